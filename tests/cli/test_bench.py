"""`octavo bench attention`: rows that hang together, JSON, and refusals before anything runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("octavo.attention._cpu")

from octavo.attention.cpu import ISAS
from octavo.bench import attention
from octavo.cli.bench import COLUMNS, PARTS
from octavo.cli.main import main


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(*argv: str) -> int:
    try:
        return main(["bench", "attention", *argv])
    except SystemExit as exit:
        return int(exit.code or 0)


def test_a_grid_has_a_row_for_every_combination(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Block size x dtype x context: rows in order, whose figures agree with each other, in table and JSON."""
    target = tmp_path / "rows.json"
    grid = (
        "--block-size",
        "1",
        "7",
        "--kv-dtype",
        "float32",
        "int8",
        "--context",
        "30",
        "100",
        "--batch",
        "2",
    )
    code = run(
        *grid,
        "--group",
        "5",
        "--seconds",
        "0.001",
        "--threads",
        "1",
        "--isa",
        ISAS[-1],
        "--json",
        str(target),
    )
    assert code == 0
    found = json.loads(target.read_text())
    assert list(found) == ["about", "grid"]
    assert found["about"] | {"isa": ISAS[-1], "threads": 1} == found["about"]
    rows = found["grid"]
    keys = [(row["block_size"], row["dtype"], row["context"]) for row in rows]
    assert keys == [(b, d, c) for b in (1, 7) for d in ("float32", "int8") for c in (30, 100)]
    for row in rows:
        slots = 2 * -(-row["context"] // row["block_size"]) * row["block_size"]
        per_slot = (
            2
            * attention.KV_HEADS
            * (attention.HEAD_DIM * 4 if row["dtype"] == "float32" else attention.HEAD_DIM + 4)
        )
        assert row["megabytes"] >= slots * per_slot / 1e6  # more where a layout pads
        assert row["gigabytes_per_second"] * row["ms"] == pytest.approx(row["megabytes"])
        share = row["gigabytes_per_second"] / row["read_gigabytes_per_second"]
        assert row["share_of_read"] == pytest.approx(share)
    text = capsys.readouterr().out
    assert text.count("float32") == text.count("int8") == 4


def test_errors_are_ordered_by_dtype(tmp_path: Path) -> None:
    """float32 loses rounding only, float16 less than bfloat16, int8 the most; all under their bounds."""
    target = tmp_path / "rows.json"
    assert run("error", "--json", str(target)) == 0
    rows = json.loads(target.read_text())["error"]
    for context in (256, 4096):
        lost = {row["dtype"]: row["relative_error"] for row in rows if row["context"] == context}
        assert 0 < lost["float32"] < 1e-5 < lost["float16"] < lost["bfloat16"] < lost["int8"] < 2e-2


def test_every_part_has_its_columns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each part's first row has exactly the keys that its table shows; named twice, a part runs once."""
    monkeypatch.setattr(attention, "COLD", 1e6)
    small: dict[str, Any] = {"batch": 1, "context": 64}
    row = attention.decode_row
    monkeypatch.setattr(attention, "decode_row", lambda *args, **kwargs: row(*args, **{**kwargs, **small}))
    backend = attention.CpuBackend()
    assert set(PARTS) == set(attention.PARTS) == set(COLUMNS) - {"grid"}
    for name, part in attention.PARTS.items():
        assert list(next(part(backend, 0.0))) == [key for key, _, _ in COLUMNS[name]]
    target = tmp_path / "rows.json"
    assert run("calls", "calls", "--seconds", "0.001", "--json", str(target)) == 0
    assert list(json.loads(target.read_text())) == ["about", "calls"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("fly",), "fly"),
        (("--isa", "mmx"), "mmx"),
        (("--json", "/nowhere/rows.json"), "--json /nowhere/rows.json"),
        (("--block-size", "0"), "--block-size"),
        (("--block-size", "257"), "--block-size"),
        (("--kv-dtype", "int4"), "--kv-dtype"),
        (("--seconds", "0"), "--seconds"),
        (("--threads", "0"), "--threads"),
    ],
)
def test_refusals(argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Unknown parts and instruction sets, numbers out of range and files out of reach: one line, code 2."""
    assert run(*argv) == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]


def test_no_subject_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """`octavo bench` alone shows its subjects."""
    with pytest.raises(SystemExit) as caught:
        main(["bench"])
    assert caught.value.code == 2
    assert "usage: octavo bench" in capsys.readouterr().err
