"""Safetensors checkpoints that are incomplete, overfull, misshapen or broken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.models import CheckpointError, ModelNotFound, UnsupportedModel
from tests.models.helpers import assert_same_logits, decoder_from, prompt, save, tiny_model

Q_BIAS = "model.layers.1.self_attn.q_proj.bias"


def edit(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """Rewrite model.safetensors after `change` worked on its tensors."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A tiny tied Llama."""
    return save(tiny_model(tie_word_embeddings=True), tmp_path)


def test_missing_tensor_is_named(checkpoint: Path) -> None:
    """A projection that is not there is an error with its name."""
    edit(checkpoint, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"lacks 1 tensor: model\.layers\.1\.mlp\.up_proj\.weight"):
        decoder_from(checkpoint)


def test_unread_tensor_is_named(checkpoint: Path) -> None:
    """A bias that the configuration does not mention is an error, not dropped in silence."""
    edit(checkpoint, lambda tensors: tensors.update({Q_BIAS: torch.zeros(64)}))
    with pytest.raises(CheckpointError, match=rf"holds 1 tensor: {Q_BIAS} that a LlamaForCausalLM"):
        decoder_from(checkpoint)


def test_absent_qwen_bias_is_an_error(tmp_path: Path) -> None:
    """Qwen2 has q/k/v biases without a flag: a checkpoint without one does not load."""
    directory = edit(save(tiny_model("Qwen2"), tmp_path), lambda tensors: tensors.pop(Q_BIAS))
    with pytest.raises(CheckpointError, match=rf"lacks 1 tensor: {Q_BIAS}"):
        decoder_from(directory)


def test_wrong_shape_names_tensor_and_both_shapes(checkpoint: Path) -> None:
    """A misshapen tensor is named with the wanted and the found shape."""
    name = "model.layers.0.self_attn.k_proj.weight"
    edit(checkpoint, lambda tensors: tensors.update({name: torch.zeros(48, 64)}))
    with pytest.raises(CheckpointError, match=rf"'{name}' has shape \[48, 64\].*wants \[32, 64\]"):
        decoder_from(checkpoint)


def test_known_leftovers_are_ignored(tmp_path: Path) -> None:
    """A stored rotary table and a second copy of a tied head load, and change nothing."""
    model = tiny_model(tie_word_embeddings=True)
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "lm_head.weight": torch.zeros(160, 64),
    }
    directory = edit(save(model, tmp_path), lambda tensors: tensors.update(extra))
    assert_same_logits(decoder_from(directory), model, prompt(20))


def test_integer_weights_are_refused(checkpoint: Path) -> None:
    """Packed integer weights are not read as numbers: the tensor and its dtype are named."""
    name = "model.embed_tokens.weight"
    edit(checkpoint, lambda tensors: tensors.update({name: torch.zeros(160, 64, dtype=torch.int8)}))
    with pytest.raises(UnsupportedModel, match=rf"'{name}' has dtype torch\.int8"):
        decoder_from(checkpoint)


@pytest.mark.parametrize("keep", [0, 4, 100, 50_000])
def test_truncated_file_is_a_typed_error(keep: int, checkpoint: Path) -> None:
    """A file cut anywhere is a CheckpointError that names it."""
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: missing, truncated or corrupt"):
        decoder_from(checkpoint)


def test_no_weights_says_what_was_looked_for(checkpoint: Path) -> None:
    """Without safetensors the error names both files, and a pickle that is not read."""
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(ModelNotFound, match=r"neither model\.safetensors nor .*index\.json.*pickle"):
        decoder_from(checkpoint)


def test_missing_shard_and_bad_index(tmp_path: Path) -> None:
    """A shard that is not there, one that lacks its tensor, and a garbled index are typed errors."""
    tiny_model().save_pretrained(tmp_path, max_shard_size="60KB")
    index_path = tmp_path / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    index["weight_map"]["ghost.weight"] = sorted(set(index["weight_map"].values()))[0]
    index_path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"lists tensor 'ghost\.weight'"):
        decoder_from(tmp_path)
    index["weight_map"]["ghost.weight"] = "../secret.safetensors"
    index_path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="not a plain file name"):
        decoder_from(tmp_path)
    index["weight_map"]["ghost.weight"] = "model-99.safetensors"
    index_path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model-99\.safetensors: missing"):
        decoder_from(tmp_path)
    index_path.write_text("{}")
    with pytest.raises(CheckpointError, match="not an index with a weight_map"):
        decoder_from(tmp_path)
