"""What the decoder needs to know about a checkpoint, whatever file it came from.

    config.json ────────┐
                        ├──> ModelConfig (frozen) ──> expected tensors, decoder, cache sizes
    GGUF metadata ──────┘    (gguf_config.py builds the second kind)

Owns the data classes, the checks that both sources share, and the reading of config.json.
A value that cannot be honoured is refused here, by name, before any weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from octavo.models.errors import ConfigError, UnsupportedModel

Family = Literal["llama", "mistral", "qwen2", "qwen3"]
RopeKind = Literal["default", "linear", "dynamic", "llama3"]

ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

# What a key means when config.json leaves it out. The classes differ, and a wrong guess gives
# wrong logits without an error, so these follow transformers' configuration classes one by one.
# None for num_key_value_heads and head_dim means "derive from the heads".
_DEFAULTS: dict[Family, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "num_key_value_heads": None, "head_dim": None},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": None},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": None},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
}
_DEFAULT_WINDOW = 4096
_MAX_LAYERS = 10_000  # a garbled count must not become a list of billions
_DEFAULT_FIRST_WINDOWED_LAYER = 28


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base frequency and how it is stretched.

    `factor` and the llama3 values matter only to the kinds that use them. `divisors`, `head_dim / 2`
    numbers from a GGUF file's rope_freqs.weight, divide the inverse frequencies one by one.
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    divisors: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and options of one decoder.

    `attention_bias` is the bias of q, k and v; `o_bias` that of the output projection.
    `layer_windows[i]` is the sliding window of layer i in tokens, None for full attention.
    """

    architecture: str
    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    layer_windows: tuple[int | None, ...]
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    hidden_act: str = "silu"

    def __post_init__(self) -> None:
        """Check what every source must satisfy. Raises ConfigError or UnsupportedModel."""
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, found {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise UnsupportedModel(f"head_dim {self.head_dim} is odd: rotary embedding pairs dimensions")
        if len(self.layer_windows) != self.num_layers:
            raise ConfigError(
                f"{len(self.layer_windows)} attention layer types are listed for {self.num_layers} layers"
            )
        if self.hidden_act not in ("silu", "swish"):
            raise UnsupportedModel(f"hidden_act {self.hidden_act!r} is not supported; supported: silu")
        if self.rope.divisors is not None and len(self.rope.divisors) != self.head_dim // 2:
            raise ConfigError(
                f"rope_freqs has {len(self.rope.divisors)} values, head_dim {self.head_dim} wants "
                f"{self.head_dim // 2}"
            )

    @property
    def sliding_window(self) -> int | None:
        """The window that is in use in at least one layer, or None."""
        return next((window for window in self.layer_windows if window is not None), None)

    @property
    def position_limit(self) -> int | None:
        """Positions from here on cannot be computed; None when the rotary table can grow without end.

        Dynamic NTK scaling changes every key already in the cache once a sequence grows past
        max_position_embeddings, so it is honoured up to there, where it changes nothing.
        """
        return self.max_position_embeddings if self.rope.kind == "dynamic" else None


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Build the config from a parsed config.json.

    Raises ConfigError for a value that is missing or malformed, UnsupportedModel for an
    architecture, rope type, activation, quantisation or expert layer that cannot be honoured.
    """
    architecture, family = _architecture(raw)
    if raw.get("quantization_config") is not None:
        method = _mapping(raw, "quantization_config").get("quant_method", "unnamed")
        raise UnsupportedModel(f"quantization_config with quant_method {method!r} is not supported")
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):
        if raw.get(key):
            raise UnsupportedModel(f"mixture of experts ({key} = {raw[key]}) is not supported")
    defaults = _DEFAULTS[family]
    num_layers = check_layers("num_hidden_layers", _integer(raw, "num_hidden_layers"))
    num_heads = _integer(raw, "num_attention_heads")
    hidden_size = _integer(raw, "hidden_size")
    if num_heads < 1:
        raise ConfigError(f"num_attention_heads must be at least 1, found {num_heads}")
    max_position = _integer(raw, "max_position_embeddings", defaults["max_position_embeddings"])
    kv_heads = raw.get("num_key_value_heads", defaults["num_key_value_heads"])
    head_dim = raw.get("head_dim", defaults["head_dim"])
    # Qwen2 has q/k/v biases without saying so; Mistral never has any; the others state a flag
    # that covers the output projection too.
    stated_bias = bool(raw.get("attention_bias", family == "qwen2"))
    return ModelConfig(
        architecture=architecture,
        family=family,
        vocab_size=_integer(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_integer(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads if kv_heads is None else _as_integer("num_key_value_heads", kv_heads),
        head_dim=hidden_size // num_heads if head_dim is None else _as_integer("head_dim", head_dim),
        rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        rope=_rope_from_hf(raw, max_position),
        max_position_embeddings=max_position,
        layer_windows=_windows_from_hf(raw, family, num_layers),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=stated_bias and family != "mistral",
        o_bias=stated_bias and family in ("llama", "qwen3"),
        mlp_bias=bool(raw.get("mlp_bias", False)) and family == "llama",
        qk_norm=family == "qwen3",
        hidden_act=str(raw.get("hidden_act") or "silu"),
    )


def check_layers(key: str, count: int) -> int:
    """Return the number of layers that `key` gives. Raises ConfigError when it cannot be one."""
    if not 1 <= count <= _MAX_LAYERS:
        raise ConfigError(f"{key} must be between 1 and {_MAX_LAYERS}, found {count}")
    return count


def eos_ids_from_hf(*sources: Mapping[str, Any]) -> frozenset[int]:
    """Collect every end-of-sequence id from config.json and generation_config.json.

    Each may hold one id, a list or nothing. Raises ConfigError when one is not an integer.
    """
    found: set[int] = set()
    for source in sources:
        value = source.get("eos_token_id")
        for item in value if isinstance(value, list) else [value]:
            if item is None:
                continue
            if isinstance(item, bool) or not isinstance(item, int):
                raise ConfigError(f"eos_token_id must be an integer or a list of them, found {value!r}")
            found.add(item)
    return frozenset(found)


def _architecture(raw: Mapping[str, Any]) -> tuple[str, Family]:
    listed = raw.get("architectures")
    if isinstance(listed, list) and listed:
        name = str(listed[0])
    else:
        by_type: dict[str, str] = {family: name for name, family in ARCHITECTURES.items()}
        if raw.get("model_type") is None:
            raise ConfigError("config.json has neither 'architectures' nor 'model_type'")
        model_type = str(raw["model_type"])
        name = by_type.get(model_type, model_type)
    family = ARCHITECTURES.get(name)
    if family is None:
        raise UnsupportedModel(
            f"architecture {name!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    return name, family


def _rope_from_hf(raw: Mapping[str, Any], max_position: int) -> RopeConfig:
    scaling = _rope_section(raw)
    partial = scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise UnsupportedModel(f"partial_rotary_factor {partial} is not supported; supported: 1.0")
    theta = _number(scaling, "rope_theta", _number(raw, "rope_theta", 10000.0))
    if theta <= 0:
        raise ConfigError(f"rope_theta must be above 0, found {theta}")
    kind: Any = scaling.get("rope_type", scaling.get("type")) or "default"
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind not in ("linear", "dynamic", "llama3"):
        raise UnsupportedModel(
            f"rope type {kind!r} is not supported; supported: default, linear, dynamic, llama3"
        )
    factor = _number(scaling, "factor")
    if factor <= 0:
        raise ConfigError(f"rope scaling factor must be above 0, found {factor}")
    if kind != "llama3":
        return RopeConfig(theta=theta, kind=kind, factor=factor)
    return RopeConfig(
        theta=theta,
        kind="llama3",
        factor=factor,
        low_freq_factor=_number(scaling, "low_freq_factor"),
        high_freq_factor=_number(scaling, "high_freq_factor"),
        original_max_position=_integer(scaling, "original_max_position_embeddings", max_position),
    )


def _rope_section(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Find the rope settings: `rope_scaling` as written up to transformers 4, or `rope_parameters`."""
    section = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(section, Mapping):
        raise ConfigError(f"rope settings must be an object, found {section!r}")
    nested = [value for value in section.values() if isinstance(value, Mapping)]
    if not nested:
        return section
    # One set per attention type: fine as long as they agree, since there is one rotary table.
    if len(nested) != len(section) or any(value != nested[0] for value in nested):
        raise UnsupportedModel("rope settings that differ between layer types are not supported")
    return nested[0]


def _windows_from_hf(raw: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int | None, ...]:
    """Give each layer's window. The size alone means nothing while the switch is off."""
    full: tuple[int | None, ...] = (None,) * num_layers
    layer_types = raw.get("layer_types")
    if layer_types is not None and not isinstance(layer_types, list):
        raise ConfigError(f"layer_types must be a list, found {layer_types!r}")
    if family == "llama":
        if layer_types and any(kind != "full_attention" for kind in layer_types):
            raise UnsupportedModel(f"layer_types {layer_types} on the Llama architecture are not supported")
        return full
    # transformers' Mistral has no switch: MistralModel goes by sliding_window alone.
    if family != "mistral" and not raw.get("use_sliding_window"):
        return full
    value = raw.get("sliding_window", _DEFAULT_WINDOW)
    if value is None:
        return full
    window = _as_integer("sliding_window", value)
    if window < 1:
        raise ConfigError(f"sliding_window must be at least 1, found {window}")
    if family == "mistral":
        return (window,) * num_layers
    if layer_types is None:
        first = _integer(raw, "max_window_layers", _DEFAULT_FIRST_WINDOWED_LAYER)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    known: dict[str, int | None] = {"full_attention": None, "sliding_attention": window}
    unknown = sorted({str(kind) for kind in layer_types} - known.keys())
    if unknown:
        raise UnsupportedModel(f"attention layer type {unknown[0]!r} is not supported")
    return tuple(known[kind] for kind in layer_types)


def _mapping(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = raw[key]
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key} must be an object, found {value!r}")
    return value


def _integer(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    return _as_integer(key, raw.get(key, default))


def _as_integer(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{key} must be an integer, found {value!r}")
    return value


def _number(raw: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = raw.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{key} must be a number, found {value!r}")
    return float(value)
