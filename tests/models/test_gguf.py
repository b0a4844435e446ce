"""GGUF files against their transformers twins, and files that are wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize

from octavo.models import CheckpointError, ConfigError, UnsupportedModel
from octavo.models.gguf_config import config_from_gguf, eos_ids_from_gguf
from octavo.models.gguf_file import GgufFile
from tests.models.gguf_files import QuantType, decoder_from_gguf, metadata_of, tensors_of, write_gguf
from tests.models.helpers import assert_same_logits, prompt, tiny_model

QUANTISED = {
    "token_embd": QuantType.Q8_0,
    "attn_q.weight": QuantType.Q4_0,
    "attn_k.weight": QuantType.Q4_1,
    "attn_v.weight": QuantType.Q5_1,
    "attn_output.weight": QuantType.BF16,
    "ffn_gate.weight": QuantType.F16,
    "ffn_up.weight": QuantType.Q5_0,
    "ffn_down.weight": QuantType.Q8_0,
}


def write_twin(
    path: Path, model: Any, architecture: str, types: dict[str, QuantType] | None = None, **extra: Any
) -> Path:
    """Write the GGUF twin of a model; `extra` metadata keys have __ for a dot after the architecture."""
    metadata = metadata_of(model.config, architecture)
    metadata.update({f"{architecture}.{key.replace('__', '.')}": value for key, value in extra.items()})
    metadata = {key: value for key, value in metadata.items() if value is not None}
    return write_gguf(path, architecture, metadata, tensors_of(model, architecture, types))


@pytest.mark.parametrize(
    ("family", "architecture", "options"),
    [
        ("Llama", "llama", {}),
        ("Llama", "llama", {"head_dim": 12, "tie_word_embeddings": True}),
        ("Llama", "llama", {"attention_bias": True, "mlp_bias": True}),
        ("Mistral", "llama", {"sliding_window": None, "head_dim": 32}),
        ("Qwen2", "qwen2", {}),
        ("Qwen3", "qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    ],
    ids=str,
)
def test_logits_equal_the_twin(
    family: str, architecture: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """A float32 GGUF of each architecture, q and k rows permuted for llama, gives the twin's logits."""
    model = tiny_model(family, **options)
    path = write_twin(tmp_path / "model.gguf", model, architecture)
    assert_same_logits(decoder_from_gguf(path), model, prompt(40))


@pytest.mark.parametrize("tied", [True, False])
def test_quantised_tensors_equal_their_dequantised_twin(tied: bool, tmp_path: Path) -> None:
    """Quantised projections and a quantised embedding are read as the numbers they stand for."""
    model = tiny_model(tie_word_embeddings=tied)
    path = write_twin(tmp_path / "model.gguf", model, "llama", QUANTISED)
    stored = {tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    assert stored >= {"Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "BF16", "F16", "F32"}
    assert_same_logits(decoder_from_gguf(path), model, prompt(40))


def test_rope_freqs_are_honoured(tmp_path: Path) -> None:
    """rope_freqs.weight carries llama3 scaling: with it the logits equal those of a llama3 model."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10000.0,
    }
    model = tiny_model(rope_parameters=scaling)
    plain = 1.0 / 10000.0 ** (torch.arange(0, 16, 2).float() / 16)
    divisors = (plain / model.model.rotary_emb.inv_freq).numpy()
    assert divisors.max() > 7
    tensors = tensors_of(model, "llama") | {"rope_freqs.weight": divisors}
    path = write_gguf(tmp_path / "model.gguf", "llama", metadata_of(model.config, "llama"), tensors)
    assert_same_logits(decoder_from_gguf(path), model, prompt(300))


@pytest.mark.parametrize("keys", [{"rope__scaling__type": "linear"}, {}], ids=["typed", "old"])
def test_linear_scaling(keys: dict[str, Any], tmp_path: Path) -> None:
    """Linear scaling is honoured, in files that state its type and in older ones that do not."""
    model = tiny_model(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0})
    factor = {"rope__scaling__factor": 4.0} if keys else {"rope__scale_linear": 4.0}
    path = write_twin(tmp_path / "model.gguf", model, "llama", **keys, **factor)
    assert_same_logits(decoder_from_gguf(path), model, prompt(100))


def test_sliding_window_of_mistral(tmp_path: Path) -> None:
    """attention.sliding_window of a llama file acts on every layer."""
    model = tiny_model("Mistral", sliding_window=8)
    path = write_twin(tmp_path / "model.gguf", model, "llama", attention__sliding_window=8)
    assert_same_logits(decoder_from_gguf(path), model, prompt(40))


def test_every_type_reads_like_the_gguf_package(tmp_path: Path) -> None:
    """Random bytes of each type that the package dequantises give the package's numbers, bit by bit."""
    random = np.random.default_rng(0)
    tensors: dict[str, Any] = {}
    for kind in QuantType:
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        packed = random.integers(0, 256, (3, 512 // block * block_bytes), dtype=np.uint8)
        if block > 1:
            tensors[kind.name] = (packed, kind)
    path = write_gguf(tmp_path / "types.gguf", "llama", {}, tensors)
    file = GgufFile(path)
    refused = set()
    for tensor in gguf.GGUFReader(path).tensors:
        try:
            with np.errstate(all="ignore"):
                wanted = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            refused.add(tensor.name)
            with pytest.raises(UnsupportedModel, match=f"'{tensor.name}' has type {tensor.name}"):
                file.read(tensor.name)
            continue
        with np.errstate(all="ignore"):
            found = file.read(tensor.name)
        assert found.shape == (3, 512)
        np.testing.assert_array_equal(found.numpy().view(np.uint32), wanted.view(np.uint32), tensor.name)
    assert {"Q8_1", "Q8_K"} <= refused
    assert len(tensors) - len(refused) > 18


@pytest.mark.parametrize("kind", ["F32", "F16", "F64"])
def test_plain_floats(kind: str, tmp_path: Path) -> None:
    """Unquantised tensors come back as float32 of the same values and shape."""
    array = np.arange(6).reshape(2, 3).astype({"F32": "f4", "F16": "f2", "F64": "f8"}[kind])
    file = GgufFile(write_gguf(tmp_path / "plain.gguf", "llama", {}, {"t": array}))
    assert file.tensors["t"].type_name == kind
    assert file.read("t").dtype == torch.float32
    assert file.read("t").tolist() == array.tolist()


def test_integer_tensor_is_refused(tmp_path: Path) -> None:
    """A tensor of integers is no weight: type and tensor are named."""
    file = GgufFile(write_gguf(tmp_path / "i.gguf", "llama", {}, {"t": np.zeros((2, 3), np.int32)}))
    with pytest.raises(UnsupportedModel, match="'t' has type I32"):
        file.read("t")


def test_metadata_of_every_kind(tmp_path: Path) -> None:
    """Scalars, strings and lists come back as written."""
    values = {"a": 7, "b": 0.5, "c": True, "d": "naïve", "e": ["x", "y"], "f": [1, -2], "g": [0.25]}
    file = GgufFile(write_gguf(tmp_path / "m.gguf", "llama", values, {}))
    assert {key: file.metadata[key] for key in values} == values


def test_missing_and_extra_tensors_are_named(tmp_path: Path) -> None:
    """A layer's tensor that is gone, and one that nobody reads, are errors with their names."""
    model = tiny_model()
    metadata, tensors = metadata_of(model.config, "llama"), tensors_of(model, "llama")
    gone = {name: value for name, value in tensors.items() if name != "blk.1.attn_norm.weight"}
    path = write_gguf(tmp_path / "gone.gguf", "llama", metadata, gone)
    with pytest.raises(CheckpointError, match=r"lacks 1 tensor: model\.layers\.1\.input_layernorm\.weight"):
        decoder_from_gguf(path)
    more = tensors | {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}
    path = write_gguf(tmp_path / "more.gguf", "llama", metadata, more)
    with pytest.raises(CheckpointError, match=r"holds 1 tensor: blk\.0\.attn_sinks\.weight"):
        decoder_from_gguf(path)
    longrope = tensors | {"rope_factors_long.weight": np.ones(8, np.float32)}
    path = write_gguf(tmp_path / "long.gguf", "llama", metadata, longrope)
    with pytest.raises(CheckpointError, match=r"rope_factors_long\.weight"):
        decoder_from_gguf(path)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"rope__scaling__type": "yarn"}, UnsupportedModel, "rope.scaling.type = 'yarn'"),
        ({"expert_count": 8}, UnsupportedModel, "llama.expert_count = 8"),
        ({"rope__dimension_count": 8}, UnsupportedModel, "rotates part of a head of 16"),
        ({"attention__value_length": 32}, UnsupportedModel, "value_length = 32 differs"),
        ({"logit_scale": 0.5}, UnsupportedModel, "logit_scale = 0.5"),
        ({"block_count": None}, ConfigError, "llama.block_count must be one integer, found None"),
        ({"attention__head_count": 0}, ConfigError, "attention.head_count is 0"),
        ({"attention__layer_norm_rms_epsilon": "x"}, ConfigError, "epsilon must be a number, found 'x'"),
    ],
)
def test_metadata_that_cannot_be_honoured(
    changes: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    """A setting that cannot be honoured, or is missing, is refused by its key and value."""
    path = write_twin(tmp_path / "model.gguf", tiny_model(), "llama", **changes)
    with pytest.raises(error, match=words):
        decoder_from_gguf(path)


def test_unknown_architecture_is_refused(tmp_path: Path) -> None:
    """Another architecture is named, and so are the supported ones."""
    path = write_gguf(tmp_path / "model.gguf", "gemma2", {}, {})
    with pytest.raises(UnsupportedModel, match=r"architecture 'gemma2'.*llama, qwen2, qwen3"):
        config_from_gguf(GgufFile(path))


def test_token_list_must_match_the_embedding(tmp_path: Path) -> None:
    """One token cut from the list is an error with both numbers."""
    model = tiny_model()
    metadata = metadata_of(model.config, "llama") | {"tokenizer.ggml.tokens": [f"t{i}" for i in range(159)]}
    path = write_gguf(tmp_path / "model.gguf", "llama", metadata, tensors_of(model, "llama"))
    with pytest.raises(ConfigError, match=r"159 tokens, token_embd\.weight has 160 rows"):
        decoder_from_gguf(path)


def test_eos_ids(tmp_path: Path) -> None:
    """End of sequence, of turn and of message all end a sequence."""
    keys = {"tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.eot_token_id": 5}
    file = GgufFile(write_gguf(tmp_path / "m.gguf", "llama", keys, {}))
    assert eos_ids_from_gguf(file) == {1, 5}


def test_file_cut_anywhere_is_a_typed_error(tmp_path: Path) -> None:
    """Every length that a file can be cut to gives CheckpointError, whatever part it ends in."""
    model = tiny_model()
    metadata = metadata_of(model.config, "llama") | {"list": ["a", "bc"], "numbers": [1, 2, 3]}
    whole = write_gguf(tmp_path / "whole.gguf", "llama", metadata, tensors_of(model, "llama")).read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, 1200, 7), 3000, len(whole) // 2, len(whole) - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            GgufFile(cut)


def test_garbled_header_is_a_typed_error(tmp_path: Path) -> None:
    """Random bytes thrown into the header never raise anything but Octavo's errors."""
    model = tiny_model()
    metadata = metadata_of(model.config, "llama") | {"list": ["a", "bc"], "numbers": [1, 2, 3]}
    whole = write_gguf(tmp_path / "whole.gguf", "llama", metadata, tensors_of(model, "llama")).read_bytes()
    random = np.random.default_rng(0)
    path = tmp_path / "garbled.gguf"
    errors = 0
    for _ in range(300):
        data = bytearray(whole[:2500])
        data[int(random.integers(4, 1500))] = int(random.integers(0, 256))
        path.write_bytes(data + whole[2500:])
        try:
            decoder_from_gguf(path)
        except (CheckpointError, ConfigError, UnsupportedModel):
            errors += 1
    assert errors > 50


def test_wrong_magic_is_named(tmp_path: Path) -> None:
    """A file that is no GGUF says how it begins."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CheckpointError, match=r"not a GGUF file: it begins with b'PK"):
        GgufFile(path)


def test_big_endian_and_future_versions_are_refused(tmp_path: Path) -> None:
    """A version that is not known is named."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + (99).to_bytes(4, "little") + bytes(16))
    with pytest.raises(CheckpointError, match="GGUF version 99 is not supported"):
        GgufFile(path)
