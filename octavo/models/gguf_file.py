"""Read a GGUF file: metadata and tensor directory eagerly, tensor data on demand.

    magic "GGUF" · version · tensor count · metadata count
    metadata   (key, type, value) ...
    directory  (name, dimensions, type, offset) ...
    padding to the alignment
    data       <- tensor offsets count from here

Owns the parsing, with every length checked against the file's size, so that a cut or garbled file
gives one CheckpointError instead of whatever breaks first. It is also several times faster than the
gguf package's reader, which makes an array object per token string. Format: ggml docs/gguf.md.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize
from torch import Tensor

from octavo.models.errors import CheckpointError, UnsupportedModel

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# GGUF value type -> struct code
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_PLAIN = {"F32": "<f4", "F64": "<f8", "F16": "<f2"}
_MAX_DIMENSIONS = 4
_MAX_DEPTH = 4  # of lists in lists: a garbled file must not exhaust the stack


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. `shape` is in torch's order, rows first; `start` counts from the file's."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    start: int
    num_bytes: int


class GgufFile:
    """A parsed file. `metadata` maps keys to numbers, booleans, strings and lists."""

    def __init__(self, path: Path, *, whole: bool = True) -> None:
        """Parse the header. Raises CheckpointError for anything that is not a whole GGUF file.

        whole: the tensors must be there, too; without it the header is enough.
        """
        self.path = path
        self.whole = whole
        try:
            # asarray: slices of a memmap object are memmap objects, which are slow to make.
            self._data = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
        except (OSError, ValueError) as error:  # ValueError: the file is empty
            raise CheckpointError(f"{path}: cannot be read: {error}") from error
        cursor = _Cursor(path, self._data)
        num_tensors, num_values = _read_preamble(cursor)
        self.metadata: Mapping[str, Any] = _read_metadata(cursor, num_values)
        entries = [_read_entry(cursor) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(f"{path}: general.alignment is {alignment!r}")
        data_start = -(-cursor.position // alignment) * alignment
        self.tensors: Mapping[str, TensorInfo] = self._place(entries, data_start)

    def read(self, name: str) -> Tensor:
        """Dequantise one tensor to float32 in its `shape`.

        Raises UnsupportedModel, naming type and tensor, when the gguf package has no dequantiser.
        """
        info = self.tensors[name]
        if info.num_bytes == 0:
            return torch.empty(info.shape)
        raw = self._data[info.start : info.start + info.num_bytes]
        if info.type_name in _PLAIN:
            # A copy: the mapped file is read-only, and torch wants memory it may write.
            return torch.from_numpy(raw.view(_PLAIN[info.type_name]).astype(np.float32)).view(info.shape)
        quantisation = gguf.GGMLQuantizationType[info.type_name]
        try:
            values = dequantize(self.raw_rows(name), quantisation)
        except NotImplementedError as error:
            raise UnsupportedModel(
                f"{self.path}: tensor {name!r} has type {info.type_name}, which cannot be dequantised"
            ) from error
        return torch.from_numpy(values).view(info.shape)

    def raw_rows(self, name: str) -> np.ndarray:
        """The bytes of one tensor that is not empty, uint8 `[rows, bytes of a row]`, read-only."""
        info = self.tensors[name]
        raw = self._data[info.start : info.start + info.num_bytes]
        return raw.reshape(-1, info.num_bytes // max(1, math.prod(info.shape[:-1])))

    def _place(self, entries: list[_Entry], data_start: int) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        for name, shape, type_id, offset in entries:
            info = _tensor_info(self.path, name, shape, type_id, data_start + offset)
            end = info.start + info.num_bytes
            if self.whole and end > len(self._data):
                raise CheckpointError(
                    f"{self.path}: truncated: tensor {name!r} ends at byte {end}, "
                    f"the file has {len(self._data)}"
                )
            if name in tensors:
                raise CheckpointError(f"{self.path}: tensor {name!r} is listed twice")
            tensors[name] = info
        return tensors


_Entry = tuple[str, tuple[int, ...], int, int]  # name, shape, type id, offset into the data


class _Cursor:
    """A position in the file that refuses to run past its end."""

    def __init__(self, path: Path, data: np.ndarray) -> None:
        self.path = path
        self.position = 0
        self._view: memoryview = data.data

    def take(self, num_bytes: int, what: str) -> memoryview:
        end = self.position + num_bytes
        if end > len(self._view):
            raise CheckpointError(
                f"{self.path}: truncated or corrupt: {what} at byte {self.position} wants {num_bytes} "
                f"bytes, the file has {len(self._view)}"
            )
        piece = self._view[self.position : end]
        self.position = end
        return piece

    def number(self, code: str, what: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0]

    def string(self, what: str) -> str:
        raw = bytes(self.take(self.number("Q", what), what))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: {what} is not UTF-8: {error}") from error


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    magic = bytes(cursor.take(4, "the magic"))
    if magic != _MAGIC:
        raise CheckpointError(f"{cursor.path}: not a GGUF file: it begins with {magic!r}, not {_MAGIC!r}")
    version = cursor.number("I", "the version")
    if version not in _VERSIONS:
        raise CheckpointError(
            f"{cursor.path}: GGUF version {version} is not supported; supported: 2, 3 (little-endian)"
        )
    return cursor.number("Q", "the tensor count"), cursor.number("Q", "the metadata count")


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.string("a metadata key")
        metadata[key] = _read_value(cursor, cursor.number("I", key), key)
    return metadata


def _read_value(cursor: _Cursor, value_type: int, key: str, depth: int = 0) -> Any:
    if value_type == _STRING:
        return cursor.string(key)
    if value_type in _SCALARS:
        return cursor.number(_SCALARS[value_type], key)
    if value_type != _ARRAY or depth > _MAX_DEPTH:
        raise CheckpointError(f"{cursor.path}: {key} has value type {value_type} at depth {depth}")
    item_type = cursor.number("I", key)
    count = cursor.number("Q", key)
    if item_type in _SCALARS:
        code = _SCALARS[item_type]
        raw = cursor.take(count * struct.calcsize("<" + code), key)
        return list(struct.unpack(f"<{count}{code}", raw))
    # Strings and nested arrays vary in size: each read fails at the end of the file, so a
    # garbled count cannot loop for long.
    return [_read_value(cursor, item_type, key, depth + 1) for _ in range(count)]


def _read_entry(cursor: _Cursor) -> _Entry:
    name = cursor.string("a tensor name")
    dimensions = cursor.number("I", name)
    if dimensions > _MAX_DIMENSIONS:
        raise CheckpointError(f"{cursor.path}: tensor {name!r} has {dimensions} dimensions")
    # GGUF lists the fastest-varying dimension first.
    shape = tuple(reversed([cursor.number("Q", name) for _ in range(dimensions)]))
    return name, shape, cursor.number("I", name), cursor.number("Q", name)


def _tensor_info(path: Path, name: str, shape: tuple[int, ...], type_id: int, start: int) -> TensorInfo:
    try:
        quantisation = gguf.GGMLQuantizationType(type_id)
    except ValueError as error:
        raise UnsupportedModel(f"{path}: tensor {name!r} has unknown type {type_id}") from error
    block, block_bytes = gguf.GGML_QUANT_SIZES[quantisation]
    columns = shape[-1] if shape else 1
    if columns % block:
        raise CheckpointError(
            f"{path}: tensor {name!r} has rows of {columns} values, not a multiple of the "
            f"{quantisation.name} block of {block}"
        )
    return TensorInfo(name, shape, quantisation.name, start, math.prod(shape) // block * block_bytes)
