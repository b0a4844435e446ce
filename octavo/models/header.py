"""What a checkpoint's header alone says: its configuration, and the memory that it will take.

Reads config.json or the header of a GGUF file (a file cut off after its header will do), never a weight.
The sums are those of the decoder that load_model() would build.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from octavo.models.build import packed_matrices
from octavo.models.config import ModelConfig, config_from_hf
from octavo.models.errors import ModelNotFound
from octavo.models.gguf_config import config_from_gguf
from octavo.models.gguf_file import GgufFile
from octavo.models.gguf_loader import GgufWeights
from octavo.models.load import read_json
from octavo.models.resolve import is_hub_name, resolve_model
from octavo.models.weights import EMBEDDING, expected_shapes

_VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
SAMPLED_COPIES = 4
"""Float32 copies of the sampled rows' logits that live at once: the logits, the rows changed by penalties
and biases, and two while one row is sorted and summed in float64."""


@dataclass(frozen=True, slots=True)
class Header:
    """config, and the types that a GGUF file stores its tensors in, by transformers' names; none for a
    config.json, whose checkpoint is taken to hold floats."""

    config: ModelConfig
    types: Mapping[str, str]


def load_header(name: str) -> Header:
    """The header of what a user names: smollm2, a directory, a config.json, a .gguf file, or a hub name, of
    which only config.json is fetched. Raises ModelError."""
    path = Path(name).expanduser()
    if path.name == "config.json" and path.is_file():
        return Header(config_from_hf(read_json(path)), {})
    if not path.exists() and is_hub_name(name):
        return Header(config_from_hf(read_json(_fetch_config(name))), {})
    path = resolve_model(name)
    if not path.is_file():
        return Header(config_from_hf(read_json(path / "config.json")), {})
    file = GgufFile(path, whole=False)
    config = config_from_gguf(file)
    source = GgufWeights(file, config)
    return Header(config, {name: source.type_name(name) for name in source.shapes()})


def weights_bytes(header: Header, dtype: str, weights: str) -> int:
    """Bytes that all weights take once loaded with these options, a tied head counted once.

    Where torch computes, all are in `dtype`; packed for the compiled kernels, matrices take what their kind
    takes. Raises UnsupportedModel for options that load_model() refuses, too.
    """
    shapes = expected_shapes(header.config)
    packed_kinds = packed_matrices(header.config, header.types, dtype, weights)
    if packed_kinds is None:
        return sum(math.prod(shape) for shape in shapes.values()) * _VALUE_BYTES[dtype]
    from octavo.ops.linear import packed_bytes

    total, seen = 0, set()
    for names, kind, paired in packed_kinds:
        outputs = sum(shapes[name][0] for name in names)
        biases = [name.removesuffix(".weight") + ".bias" for name in names]
        biased = [bias for bias in biases if bias in shapes]
        total += packed_bytes(kind, outputs, shapes[names[0]][1], biased=bool(biased), paired=paired)
        seen |= {*names, *biased}
    return total + 4 * sum(math.prod(shape) for name, shape in shapes.items() if name not in seen)


def quantised(header: Header, dtype: str, weights: str) -> bool:
    """What Decoder.quantised would be with these options."""
    kinds = packed_matrices(header.config, header.types, dtype, weights) or ()
    tied = header.config.tie_word_embeddings
    return any(kind != "float32" for names, kind, _ in kinds if tied or names != (EMBEDDING,))


def activation_bytes(config: ModelConfig, value_bytes: int, num_tokens: int, num_rows: int) -> int:
    """An upper bound of what a step of `num_tokens` tokens, `num_rows` of them sampled, has at once besides
    weights and KV: the wider of a layer's two halves, or the logits."""
    hidden = config.hidden_size
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    attention = 2 * heads + config.num_heads * config.head_dim + hidden
    mlp = 3 * config.intermediate_size + hidden
    layer = num_tokens * value_bytes * (2 * hidden + max(attention, mlp))
    positions = num_tokens * (4 * config.head_dim + 64)  # angles in float32, ids, slots
    logits = num_rows * config.vocab_size * 4 * SAMPLED_COPIES
    return layer + positions + logits


def _fetch_config(name: str) -> Path:
    try:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(repo_id=name, filename="config.json"))
    except Exception as error:  # the client raises its own, the network's and the disk's errors
        raise ModelNotFound(
            f"{name!r}: config.json is not on the hub: {type(error).__name__}: {error}"
        ) from error
