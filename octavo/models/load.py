"""A checkpoint on disk becomes a model that can run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from octavo.models.build import build_decoder
from octavo.models.config import ModelConfig, config_from_hf, eos_ids_from_hf
from octavo.models.decoder import Decoder
from octavo.models.errors import ConfigError
from octavo.models.gguf_config import config_from_gguf, eos_ids_from_gguf
from octavo.models.gguf_file import GgufFile
from octavo.models.gguf_loader import GgufWeights
from octavo.models.resolve import resolve_model
from octavo.models.safetensors_loader import SafetensorsWeights
from octavo.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Everything the engine needs from a checkpoint.

    `eos_token_ids` is the union of what the generation config, the config and the tokenizer name.
    `weights_bytes` is the memory of all weights as they are loaded.
    """

    name: str
    path: Path
    config: ModelConfig
    decoder: Decoder
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    weights_bytes: int


def load_model(path: Path | str, dtype: torch.dtype = torch.float32, weights: str = "auto") -> LoadedModel:
    """Load a model from a path, or from a name that resolve_model understands.

    dtype: float32, bfloat16 or float16, for hidden states. weights: auto (as stored), float32, int8 or
    int4; see build_decoder. The name is the one given,
    or the file's or directory's when a Path is. Raises ModelError.
    """
    if isinstance(path, str):
        name, path = path, resolve_model(path)
        name = path.stem if name.lower().endswith(".gguf") else name
    else:
        path = resolve_model(str(path))
        name = path.stem if path.is_file() else path.resolve().name
    if path.is_file():
        file = GgufFile(path)
        config = config_from_gguf(file)
        tokenizer = Tokenizer.from_gguf(file)
        decoder = build_decoder(config, GgufWeights(file, config), dtype, weights)
        eos_ids = eos_ids_from_gguf(file)
    else:
        raw = read_json(path / "config.json")
        config = config_from_hf(raw)
        generation_path = path / "generation_config.json"
        eos_ids = eos_ids_from_hf(raw, read_json(generation_path) if generation_path.is_file() else {})
        tokenizer = Tokenizer.from_directory(path)
        decoder = build_decoder(config, SafetensorsWeights(path), dtype, weights)
    if tokenizer.eos_token_id is not None:
        eos_ids |= {tokenizer.eos_token_id}
    return LoadedModel(name, path, config, decoder, tokenizer, eos_ids, decoder.weights_bytes)


def read_json(path: Path) -> Mapping[str, Any]:
    """Read a JSON object. Raises ConfigError when it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return value
