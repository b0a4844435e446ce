"""Whose KV a file holds: a hash of everything that decides the bytes of a block, but its tokens and scope.

    fingerprint = sha256 of  KV_VERSION | layout | block size | dtypes | architecture config
                             | each weights file: name, size, content

A weights file counts with all its bytes up to WHOLE_FILE. Of a larger one count its size, its first and
last EDGE bytes (the directory of tensors and the ends of the data) and SAMPLES stretches of SAMPLE bytes
spread evenly over it: about 0.4 GB to read, whatever the size. Another model, quantisation or training
run differs in all of them. What is not seen is an edit, in a file of that size, of a few rows or norms
between two samples; `thorough=True` reads everything. Time stamps do not count: a copy is the same
model, and an edit can keep them. The tokenizer does not count: KV follows from ids alone.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import torch

from octavo.engine.tiers.errors import StoreError

KV_VERSION = 1
"""Raise this when a change of the code changes what a forward pass writes to the cache."""

WHOLE_FILE = 2**30
EDGE = 64 * 2**20
SAMPLES = 1024
SAMPLE = 256 * 2**10
_READ = 2**20


def fingerprint(
    model_path: Path,
    config: object,
    *,
    dtype: torch.dtype,
    block_size: int,
    kv_dtype: torch.dtype | None = None,
    weights: str = "",
    layout: str,
    thorough: bool = False,
) -> str:
    """64 hex digits that match only where stored KV may be served.

    model_path: a .gguf file, or a directory whose *.safetensors files count. config: the architecture,
    by its repr. dtype: of hidden states; kv_dtype: of the cache, the same by default. weights: the formats
    that they are computed in.
    Raises StoreError when the files cannot be read. Cost: SHA-256 of what is read, about 1 GB/s.
    """
    total = hashlib.sha256()
    # Each part with its length first, so that no two lists of parts spell the same bytes.
    for part in (KV_VERSION, layout, block_size, dtype, kv_dtype or dtype, weights, repr(config)):
        _add(total, str(part).encode())
    try:
        files = sorted(model_path.glob("*.safetensors")) if model_path.is_dir() else [model_path]
        for file in files:
            # A lone file may be renamed; shards are told apart by their names.
            _add(total, file.name.encode() if model_path.is_dir() else b"")
            _add(total, _content(file, thorough).encode())
    except OSError as error:
        raise StoreError(f"cannot read the weights of {model_path}: {error}") from error
    if not files:
        raise StoreError(f"{model_path}: no .safetensors file, so stored KV cannot be told from another's")
    return total.hexdigest()


def _add(total: hashlib._Hash, part: bytes) -> None:
    total.update(len(part).to_bytes(8, "little") + part)


def _content(path: Path, thorough: bool) -> str:
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256(size.to_bytes(8, "little"))
        whole = thorough or size <= WHOLE_FILE
        # Which way it was read counts, so that a digest of samples never meets one of a whole file.
        digest.update(b"whole" if whole else b"samples")
        for start, end in [(0, size)] if whole else _stretches(size):
            while start < end:
                data = os.pread(file.fileno(), min(_READ, end - start), start)
                if not data:
                    raise OSError(f"{path} ended at {start} of {size} bytes")
                digest.update(data)
                start += len(data)
    return digest.hexdigest()


def _stretches(size: int) -> Iterable[tuple[int, int]]:
    yield 0, EDGE
    step = (size - SAMPLE) // SAMPLES
    for start in range(step, size - SAMPLE, step):
        yield start, start + SAMPLE
    yield size - EDGE, size
