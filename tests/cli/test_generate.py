"""`octavo generate` over a fake engine."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from octavo.cli.main import main
from octavo.engine.params import SamplingParams
from tests.server.fake_engine import WORDS, FakeEngineThread

TEXT = "".join(WORDS)
Capture = pytest.CaptureFixture[str]


def lines(capture: Capture) -> list[dict[str, object]]:
    return [json.loads(line) for line in capture.readouterr().out.splitlines()]


def test_text(engine: FakeEngineThread, capsys: Capture) -> None:
    """Results go to stdout, the start-up table to stderr, and the engine is shut down."""
    assert main(["generate", "--prompt", "abc", "--max-tokens", "2"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "--- prompt 1: abc\n--- answer 1, length, 2 tokens:\nOne sheet\n"
    assert "fake/model" in captured.err
    assert "8 of 16 tokens" in captured.err
    assert engine.stopped


def test_long_table_values(
    engine: FakeEngineThread, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start-up table shows a long path whole, over several lines, and takes no part of it as markup."""
    path = "/models/[red]" + "x" * 200
    monkeypatch.setattr(type(engine.engine), "describe", lambda self: [("model", path)])
    assert main(["generate", "--prompt", "a"]) == 0
    lines = capsys.readouterr().err.splitlines()
    cells = [line.split("\u2502")[2].strip() for line in lines if line.startswith("\u2502")]
    assert "".join(cells) == path


def test_json(engine: FakeEngineThread, capsys: Capture) -> None:
    """--json prints one object a line with documented fields, prompts in order, n answers each."""
    engine.delay = 0.001
    code = main(["generate", "--json", "--n", "2", "--prompt", "caf\u00e9", "--prompt", "b"])
    assert code == 0
    found = lines(capsys)
    assert [(item["prompt"], item["index"]) for item in found] == [
        ("caf\u00e9", 0),
        ("caf\u00e9", 1),
        ("b", 0),
        ("b", 1),
    ]
    assert found[0] == {
        "prompt": "caf\u00e9",
        "index": 0,
        "text": TEXT,
        "num_tokens": len(WORDS),
        "finish_reason": "stop",
        "error": None,
    }
    assert found[1]["text"] == "".join(WORDS[1:])


def test_file(engine: FakeEngineThread, capsys: Capture, tmp_path: Path) -> None:
    """A file has a prompt on each line; empty lines and Windows line ends do not matter."""
    path = tmp_path / "prompts.txt"
    path.write_bytes("one\r\n\r\n  two\u00e9\n\n".encode())
    assert main(["generate", "--json", "--prompts-file", str(path)]) == 0
    assert [item["prompt"] for item in lines(capsys)] == ["one", "  two\u00e9"]


def test_standard_input(engine: FakeEngineThread, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """- reads prompts from standard input."""
    monkeypatch.setattr("sys.stdin", io.StringIO("a\nb\n"))
    assert main(["generate", "--json", "--prompts-file", "-"]) == 0
    assert [item["prompt"] for item in lines(capsys)] == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "shown"), [(None, "cannot read"), (b"\n\n", "no prompt"), (b"\xff", "UTF-8")]
)
def test_bad_file(
    engine: FakeEngineThread, capsys: Capture, tmp_path: Path, content: bytes | None, shown: str
) -> None:
    """A missing, empty or unreadable file is one line that names it, before anything is loaded."""
    path = tmp_path / "prompts.txt"
    if content is not None:
        path.write_bytes(content)
    assert main(["generate", "--prompts-file", str(path)]) == 2
    error = capsys.readouterr().err
    assert shown in error
    assert str(path) in error
    assert engine.configs == []


def test_empty_prompt(engine: FakeEngineThread, capsys: Capture) -> None:
    """An empty --prompt is refused by name."""
    assert main(["generate", "--prompt", ""]) == 2
    assert "--prompt" in capsys.readouterr().err


def test_refused_prompt(engine: FakeEngineThread, capsys: Capture) -> None:
    """A prompt that does not fit is reported and counted in the exit code; the others are answered."""
    code = main(["generate", "--json", "--prompt", "a" * 101, "--prompt", "b"])
    assert code == 2
    captured = capsys.readouterr()
    first, second = (json.loads(line) for line in captured.out.splitlines())
    assert "101 tokens" in first["error"]
    assert (second["text"], second["error"]) == (TEXT, None)
    assert "prompt 1: " in captured.err


def test_sampling_options(engine: FakeEngineThread) -> None:
    """Each option sets its field of SamplingParams; none of them leaves the defaults."""
    options = ["--temperature=0.5", "--top-p=0.9", "--top-k=5", "--min-p=0.1", "--seed=7", "--max-tokens=9"]
    assert main(["generate", "--prompt", "a", "--n", "2", *options, "--stop", "x", "--stop", "y"]) == 0
    assert main(["generate", "--prompt", "a"]) == 0
    assert engine.seen[0][1] == SamplingParams(
        n=2, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, seed=7, max_tokens=9, stop=("x", "y")
    )
    assert engine.seen[1][1] == SamplingParams()
