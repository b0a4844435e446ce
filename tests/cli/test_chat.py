"""`octavo chat` over a fake engine, with scripted input."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from octavo.cli.main import main
from octavo.engine.outputs import RequestDelta
from tests.server.fake_engine import WORDS, FakeEngineThread

TEXT = "".join(WORDS)
Talk = Callable[..., int]


@pytest.fixture
def talk(engine: FakeEngineThread, monkeypatch: pytest.MonkeyPatch) -> Talk:
    """Run the command with these lines typed; then the input ends."""

    def run(*typed: str) -> int:
        lines: Iterator[str] = iter(typed)

        def read(_: str) -> str:
            try:
                return next(lines)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr("builtins.input", read)
        return main(["chat", "--max-tokens", "50"])

    return run


def prompts(engine: FakeEngineThread) -> list[str]:
    return [bytes(ids).decode() for ids, _ in engine.seen]


def test_conversation(talk: Talk, engine: FakeEngineThread, capsys: pytest.CaptureFixture[str]) -> None:
    """Each answer is printed and seen by the next turn; the end of input ends the command."""
    engine.engine.max_model_len = 1000
    assert talk("hi", "  ", "more") == 0
    assert capsys.readouterr().out.count(TEXT) == 2
    first, second = prompts(engine)
    assert first == "user: hi\nassistant:"
    assert second == f"user: hi\nassistant: {TEXT}\nuser: more\nassistant:"
    assert engine.stopped


def test_clear_and_exit(talk: Talk, engine: FakeEngineThread) -> None:
    """/clear forgets the conversation, /exit ends, and what comes after it is not asked."""
    assert talk("hi", "/clear", "again", "/exit", "never") == 0
    assert prompts(engine) == ["user: hi\nassistant:", "user: again\nassistant:"]


def test_unknown_command(talk: Talk, engine: FakeEngineThread, capsys: pytest.CaptureFixture[str]) -> None:
    """A mistyped command is not sent to the model; the help is shown."""
    assert talk("/quit now") == 0
    assert "/quit is no command" in capsys.readouterr().out
    assert engine.seen == []


def test_too_long(talk: Talk, engine: FakeEngineThread, capsys: pytest.CaptureFixture[str]) -> None:
    """A turn that does not fit says so, and the conversation goes on from before it."""
    assert talk("x" * 200, "hi") == 0
    assert "/clear" in capsys.readouterr().err
    assert prompts(engine) == ["user: hi\nassistant:"]


def test_interrupt_stops_the_answer_only(
    talk: Talk,
    engine: FakeEngineThread,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ctrl-C aborts the running answer, keeps what was said of it, and the conversation goes on."""
    engine.engine.max_model_len = 1000
    step = engine._step

    def pressed(number: int, *args: Any) -> RequestDelta:
        if number == 4 and len(engine.seen) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return step(number, *args)

    monkeypatch.setattr(engine, "_step", pressed)
    assert talk("hi", "more") == 0
    assert (engine.running, engine.aborted) == (0, 1)
    kept = prompts(engine)[1].removeprefix("user: hi\nassistant: ").removesuffix("\nuser: more\nassistant:")
    assert kept
    assert TEXT.startswith(kept)
    assert len(kept) < len(TEXT)
    assert "(stopped)" in capsys.readouterr().out
