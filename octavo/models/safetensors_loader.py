"""Weights from a directory of safetensors files.

    model.safetensors                    one file, or
    model.safetensors.index.json  -----> {"weight_map": {tensor name: shard file}}

Owns finding the files and reading tensors from them; what must be there is weights.py's business.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from octavo.models.errors import CheckpointError, ModelNotFound, UnsupportedModel
from octavo.ops.packing import StoredMatrix

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_READABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class SafetensorsWeights:
    """WeightSource over a checkpoint directory. Files stay mapped as long as the object lives."""

    def __init__(self, directory: Path) -> None:
        """Open every file. Raises ModelNotFound without weights, CheckpointError for a bad file."""
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Any] = {}  # tensor name -> open file
        index = _read_index(directory)
        for file_name in sorted(set(index.values())) if index else [SINGLE_FILE]:
            self._open(directory / file_name)
        absent = sorted(name for name in index if name not in self._files)
        if absent:
            raise CheckpointError(
                f"{directory / INDEX_FILE} lists tensor {absent[0]!r} in {index[absent[0]]}, which lacks it"
            )

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor in every file."""
        return self._shapes

    def read(self, name: str) -> Tensor:
        """Read one tensor in its stored dtype. Raises UnsupportedModel unless that is a plain float."""
        try:
            tensor: Tensor = self._files[name].get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"tensor {name!r} cannot be read: {error}") from error
        if tensor.dtype not in _READABLE:
            raise UnsupportedModel(f"tensor {name!r} has dtype {tensor.dtype}, which is not supported")
        return tensor

    def type_name(self, name: str) -> str:
        """How the file stores it: F32, BF16, F16, F64, or safetensors' word for another dtype."""
        return str(self._files[name].get_slice(name).get_dtype())

    def stored(self, name: str) -> StoredMatrix:
        """Read a matrix as float32. Raises as read() does."""
        return StoredMatrix("float32", self.read(name).to(torch.float32).numpy())

    def _open(self, path: Path) -> None:
        try:
            file: Any = safe_open(path, framework="pt")
            for name in file.keys():  # noqa: SIM118 - a handle, not a dictionary
                if name in self._files:
                    raise CheckpointError(f"tensor {name!r} is in two files, the second is {path}")
                self._files[name] = file
                self._shapes[name] = tuple(file.get_slice(name).get_shape())
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: missing, truncated or corrupt: {error}") from error


def _read_index(directory: Path) -> dict[str, str]:
    """Return tensor name -> file name, empty when there is a single file."""
    if (directory / SINGLE_FILE).is_file():
        return {}
    path = directory / INDEX_FILE
    if not path.is_file():
        others = sorted(item.name for item in directory.glob("*.bin"))
        hint = f"; {others[0]} is a pickle, which is not read" if others else ""
        raise ModelNotFound(f"{directory}: neither {SINGLE_FILE} nor {INDEX_FILE} is there{hint}")
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        index = {str(name): str(file_name) for name, file_name in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: not an index with a weight_map: {error!r}") from error
    for file_name in index.values():
        if Path(file_name).name != file_name:
            raise CheckpointError(f"{path}: shard {file_name!r} is not a plain file name")
    return index
