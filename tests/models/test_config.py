"""config.json: defaults by family, and what is refused by name."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from octavo.models import ConfigError, ModelError, UnsupportedModel
from octavo.models.config import config_from_hf, eos_ids_from_hf

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


def config(architecture: str = "LlamaForCausalLM", **changes: Any) -> Any:
    """Build from the smallest config.json plus changes."""
    return config_from_hf({**BASE, "architectures": [architecture], **changes})


def test_defaults_follow_the_family() -> None:
    """Absent keys mean what each transformers class makes of them."""
    llama = config()
    assert (llama.num_kv_heads, llama.head_dim, llama.max_position_embeddings) == (4, 16, 2048)
    assert not (llama.attention_bias)
    assert not (llama.o_bias)
    assert not (llama.mlp_bias)
    assert not (llama.qk_norm)
    qwen2 = config("Qwen2ForCausalLM", num_key_value_heads=2)
    assert (qwen2.attention_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = config("Qwen3ForCausalLM", num_key_value_heads=2)
    assert (qwen3.attention_bias, qwen3.o_bias, qwen3.qk_norm, qwen3.head_dim) == (False, False, True, 128)
    mistral = config("MistralForCausalLM", num_key_value_heads=2)
    assert mistral.layer_windows == (4096, 4096, 4096)


def test_model_type_stands_in_for_architectures() -> None:
    """A config.json with model_type alone is understood."""
    raw = {key: value for key, value in BASE.items() if key != "architectures"}
    assert config_from_hf({**raw, "model_type": "llama"}).architecture == "LlamaForCausalLM"


def test_layer_types_pick_the_windowed_layers() -> None:
    """Only layers that layer_types calls sliding get the window."""
    found = config(
        "Qwen2ForCausalLM",
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=7,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    )
    assert found.layer_windows == (None, 7, None)
    assert found.sliding_window == 7


def test_max_window_layers_is_the_first_windowed_layer() -> None:
    """Without layer_types, layers from max_window_layers on are windowed."""
    switched_on = {"use_sliding_window": True, "sliding_window": 7, "num_key_value_heads": 2}
    assert config("Qwen3ForCausalLM", **switched_on, max_window_layers=1).layer_windows == (None, 7, 7)
    assert config("Qwen3ForCausalLM", **switched_on).layer_windows == (None, None, None)


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Mistral"])
@pytest.mark.parametrize("switch", [True, False, None, "absent"])
@pytest.mark.parametrize("size", [8, None])
def test_a_window_needs_its_switch_and_its_size(family: str, switch: Any, size: int | None) -> None:
    """The size alone windows nothing where there is a switch; Mistral has none, and what it says is nothing,
    as in transformers."""
    options: dict[str, Any] = {"sliding_window": size, "max_window_layers": 0, "num_key_value_heads": 2}
    if switch != "absent":
        options["use_sliding_window"] = switch
    on = size is not None and (switch is True or family == "Mistral")
    assert config(f"{family}ForCausalLM", **options).layer_windows == ((8 if on else None),) * 3


def test_llama_never_windows() -> None:
    """Llama has no sliding attention in transformers, whatever the key says."""
    assert config(sliding_window=8).sliding_window is None


def test_nested_rope_parameters_that_agree_are_one() -> None:
    """rope_parameters by layer type are accepted while they are the same."""
    scaling = {"rope_type": "linear", "factor": 2.0, "rope_theta": 777.0}
    rope = config(rope_parameters={"full_attention": scaling, "sliding_attention": dict(scaling)}).rope
    assert (rope.kind, rope.factor, rope.theta) == ("linear", 2.0, 777.0)


def test_llama3_falls_back_to_the_context_length() -> None:
    """Without original_max_position_embeddings, llama3 takes max_position_embeddings."""
    scaling = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
    assert config(rope_scaling=scaling, max_position_embeddings=64).rope.original_max_position == 64


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not supported.*LlamaForCausalLM"),
        ({"architectures": None, "model_type": "gemma"}, "'gemma' is not supported"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope type 'yarn'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope type 'longrope'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor 0.25"),
        ({"num_local_experts": 8}, "mixture of experts.*num_local_experts = 8"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quant_method 'gptq'"),
        ({"head_dim": 5}, "head_dim 5 is odd"),
        ({"partial_rotary_factor": "x"}, "partial_rotary_factor x"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types.*sliding_attention"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    """An UnsupportedModel names the setting and its value."""
    with pytest.raises(UnsupportedModel, match=words):
        config_from_hf({**BASE, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": None}, "vocab_size must be an integer, found None"),
        ({"hidden_size": "64"}, "hidden_size must be an integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be between 1 and 10000, found 0"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers must be between"),
        ({"num_attention_heads": 0}, "num_attention_heads must be at least 1"),
        ({"num_key_value_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"rope_scaling": {"type": "linear"}}, "factor must be a number, found None"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor must be above 0"),
        ({"rope_theta": -1}, "rope_theta must be above 0"),
        ({"architectures": None}, "neither 'architectures' nor 'model_type'"),
    ],
)
def test_values_that_make_no_sense_are_named(changes: dict[str, Any], words: str) -> None:
    """A ConfigError names the key and what was found."""
    with pytest.raises(ConfigError, match=words):
        config_from_hf({**BASE, **changes})


@pytest.mark.parametrize("junk", [None, True, -1, 10**30, 0.5, float("nan"), "x", [], ["x"], {}, {"a": {}}])
def test_junk_never_raises_a_raw_error(junk: Any) -> None:
    """Any JSON value under any key gives a config or an error of this package."""
    for architecture in ("MistralForCausalLM", "Qwen2ForCausalLM"):
        keys = [*BASE, *_OPTIONAL]
        for key in keys:
            raw = {**BASE, "architectures": [architecture], "num_key_value_heads": 2}
            if architecture.startswith("Qwen"):
                raw["use_sliding_window"] = True
            with contextlib.suppress(ModelError):
                config_from_hf({**raw, key: junk})


_OPTIONAL = [
    "model_type",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "max_position_embeddings",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
    "attention_bias",
    "hidden_act",
    "quantization_config",
    "num_local_experts",
]


def test_eos_ids_are_a_union() -> None:
    """One id, a list, or nothing, from both files, add up."""
    assert eos_ids_from_hf({"eos_token_id": 2}, {"eos_token_id": [2, 7]}, {}) == {2, 7}
    assert eos_ids_from_hf({"eos_token_id": None}) == frozenset()
    with pytest.raises(ModelError, match="eos_token_id must be an integer"):
        eos_ids_from_hf({"eos_token_id": ["</s>"]})
