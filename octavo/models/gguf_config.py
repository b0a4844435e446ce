"""ModelConfig from GGUF metadata.

    general.architecture  llama (also Mistral) | qwen2 | qwen3
    <arch>.*              sizes, rope, norm epsilon
    tensor directory      biases, an untied head, rope_freqs: the metadata does not mention them

Owns the reading of those keys; the checks that both formats share are in config.py.
"""

from __future__ import annotations

from typing import Any

from octavo.models.config import Family, ModelConfig, RopeConfig, RopeKind, check_layers
from octavo.models.errors import ConfigError, UnsupportedModel
from octavo.models.gguf_file import GgufFile

_FAMILIES: dict[str, Family] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ROPE_DIVISORS = "rope_freqs.weight"

# Keys that change the arithmetic in a way the decoder does not have, with the value that means "off".
_MUST_BE_OFF: dict[str, float] = {
    "expert_count": 0,
    "attention.clamp_kqv": 0,
    "attention.scale": 0,
    "attn_logit_softcapping": 0,
    "final_logit_softcapping": 0,
    "logit_scale": 1,
    "embedding_scale": 1,
    "residual_scale": 1,
    "rope.scaling.attn_factor": 1,
}
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """Build the config from a GGUF file's metadata and tensor directory.

    Raises ConfigError for a key that is missing or malformed, UnsupportedModel for an architecture,
    rope type or other setting that cannot be honoured.
    """
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ConfigError(f"{file.path}: no general.architecture in the metadata")
    if architecture not in _FAMILIES:
        raise UnsupportedModel(
            f"{file.path}: architecture {architecture!r} is not supported; supported: {', '.join(_FAMILIES)}"
        )
    keys = _Keys(file, architecture)
    for key, off in _MUST_BE_OFF.items():
        value = keys.number(key, off)
        if value not in (off, 0):
            raise UnsupportedModel(f"{file.path}: {architecture}.{key} = {value} is not supported")
    family = _FAMILIES[architecture]
    hidden_size = keys.integer("embedding_length")
    num_heads = keys.integer("attention.head_count")
    num_layers = check_layers(keys.describe("block_count"), keys.integer("block_count"))
    if num_heads < 1:
        raise ConfigError(f"{file.path}: {architecture}.attention.head_count is {num_heads}")
    biases = {
        name.split(".")[2] for name in file.tensors if name.startswith("blk.") and name.endswith(".bias")
    }
    return ModelConfig(
        architecture=_CLASSES[architecture],
        family=family,
        vocab_size=_vocab_size(file),
        hidden_size=hidden_size,
        intermediate_size=keys.integer("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=keys.integer("attention.head_count_kv", num_heads),
        head_dim=_head_dim(keys, hidden_size // num_heads),
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope=_rope(file, keys),
        max_position_embeddings=keys.integer("context_length"),
        layer_windows=(_window(keys, family),) * num_layers,
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias=family == "qwen2" or bool(biases & {"attn_q", "attn_k", "attn_v"}),
        o_bias="attn_output" in biases,
        mlp_bias=bool(biases & {"ffn_gate", "ffn_up", "ffn_down"}),
        qk_norm=family == "qwen3",
    )


def eos_ids_from_gguf(file: GgufFile) -> frozenset[int]:
    """Ids that end a sequence: end of sequence, end of turn, end of message."""
    found = (file.metadata.get(f"tokenizer.ggml.{key}") for key in _EOS_KEYS)
    return frozenset(value for value in found if isinstance(value, int))


class _Keys:
    """`<arch>.*` values, checked for their type."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self._file = file
        self._architecture = architecture

    def describe(self, key: str) -> str:
        return f"{self._file.path}: {self._architecture}.{key}"

    def get(self, key: str, default: Any = None) -> Any:
        return self._file.metadata.get(f"{self._architecture}.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]  # some exporters write one number per layer
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{self.describe(key)} must be one integer, found {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f"{self.describe(key)} must be a number, found {value!r}")
        return float(value)


def _vocab_size(file: GgufFile) -> int:
    """Rows of the embedding, which must agree with the token list: GGUF pads the list to match."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError(f"{file.path}: no token_embd.weight matrix")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) != embedding.shape[0]:
        raise ConfigError(
            f"{file.path}: tokenizer.ggml.tokens lists {len(tokens)} tokens, token_embd.weight has "
            f"{embedding.shape[0]} rows"
        )
    return embedding.shape[0]


def _head_dim(keys: _Keys, derived: int) -> int:
    rotated = keys.integer("rope.dimension_count", 0)
    head_dim = keys.integer("attention.key_length", rotated or derived)
    if rotated not in (0, head_dim):
        raise UnsupportedModel(
            f"{keys.describe('rope.dimension_count')} = {rotated} rotates part of a head of {head_dim}: "
            "partial rotary embedding is not supported"
        )
    value_length = keys.integer("attention.value_length", head_dim)
    if value_length != head_dim:
        raise UnsupportedModel(
            f"{keys.describe('attention.value_length')} = {value_length} differs from "
            f"the key length {head_dim}"
        )
    return head_dim


def _rope(file: GgufFile, keys: _Keys) -> RopeConfig:
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    # Files from before rope.scaling.type existed say "linear" by the factor alone.
    kind = str(keys.get("rope.scaling.type", "none" if factor in (0.0, 1.0) else "linear"))
    kinds: dict[str, RopeKind] = {"none": "default", "linear": "linear"}
    if kind not in kinds:
        raise UnsupportedModel(
            f"{keys.describe('rope.scaling.type')} = {kind!r} is not supported; supported: {', '.join(kinds)}"
        )
    if kind == "linear" and factor <= 0:
        raise ConfigError(f"{keys.describe('rope.scaling.factor')} must be above 0, found {factor}")
    divisors = None
    if ROPE_DIVISORS in file.tensors and file.whole:
        divisors = tuple(file.read(ROPE_DIVISORS).flatten().tolist())
    return RopeConfig(
        theta=keys.number("rope.freq_base", 10000.0), kind=kinds[kind], factor=factor, divisors=divisors
    )


def _window(keys: _Keys, family: Family) -> int | None:
    window = keys.integer("attention.sliding_window", 0)
    if window == 0:
        return None
    if family != "llama":
        # These families window some layers only, and no key says which.
        raise UnsupportedModel(f"{keys.describe('attention.sliding_window')} = {window} is not supported")
    return window
