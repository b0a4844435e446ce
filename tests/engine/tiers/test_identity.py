"""The fingerprint changes with everything that changes KV, and with nothing else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.engine.tiers import StoreError, fingerprint, identity
from octavo.models.config import RopeConfig


def of(path: Path, **changes: Any) -> str:
    options: dict[str, Any] = {
        "config": RopeConfig(),
        "dtype": torch.float32,
        "block_size": 16,
        "layout": "rows",
    }
    options |= changes
    return fingerprint(path, options.pop("config"), **options)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(os.urandom(100_000))
    return path


def test_it_changes_with_each_of_its_inputs(weights: Path) -> None:
    prints = [
        of(weights),
        of(weights, config=RopeConfig(theta=5.0)),
        of(weights, dtype=torch.bfloat16),
        of(weights, kv_dtype=torch.int8),
        of(weights, block_size=32),
        of(weights, layout="other"),
    ]
    assert len(set(prints)) == len(prints)
    assert all(len(item) == 64 and int(item, 16) >= 0 for item in prints)


def test_it_stays_the_same_for_a_copy_of_another_name_and_time(weights: Path) -> None:
    copy = weights.with_name("copy.gguf")
    copy.write_bytes(weights.read_bytes())
    os.utime(copy, (1, 1))
    assert of(copy) == of(weights)
    assert of(weights, kv_dtype=torch.float32) == of(weights)


def test_any_byte_of_a_file_that_is_read_whole_counts(weights: Path) -> None:
    before = of(weights)
    data = bytearray(weights.read_bytes())
    for position in (0, 50_000, 99_999):
        data[position] ^= 1
        weights.write_bytes(data)
        assert of(weights) != before
        data[position] ^= 1
    weights.write_bytes(data + b"\0")
    assert of(weights) != before


def test_of_a_large_file_size_ends_and_samples_count(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "WHOLE_FILE", 50_000)
    monkeypatch.setattr(identity, "EDGE", 1000)
    monkeypatch.setattr(identity, "SAMPLES", 10)
    monkeypatch.setattr(identity, "SAMPLE", 100)
    before, thorough = of(weights), of(weights, thorough=True)
    assert before != thorough
    data = bytearray(weights.read_bytes())
    for position, seen in ((10, True), (99_990, True), (9_990 * 5 + 50, True), (9_990 * 5 + 500, False)):
        data[position] ^= 1
        weights.write_bytes(data)
        assert (of(weights) != before) == seen
        assert of(weights, thorough=True) != thorough
        data[position] ^= 1
    weights.write_bytes(data[:-1])
    assert of(weights) != before


def test_a_directory_counts_its_weights_by_name(tmp_path: Path) -> None:
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    first.write_bytes(b"1")
    second.write_bytes(b"2")
    before = of(tmp_path)
    (tmp_path / "README.md").write_text("not weights")
    assert of(tmp_path) == before
    first.write_bytes(b"2")
    second.write_bytes(b"1")
    assert of(tmp_path) != before


def test_weights_that_cannot_be_read_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot read the weights"):
        of(tmp_path / "nothing.gguf")
    with pytest.raises(StoreError, match="told from another"):
        of(tmp_path)
