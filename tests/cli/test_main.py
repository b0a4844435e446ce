"""The parser: help, version, refusals by option name, and errors as one line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from octavo import __version__
from octavo.cli.main import main
from octavo.cli.options import engine_config
from octavo.errors import InvalidRequest, OctavoError
from tests.server.fake_engine import FakeEngineThread

COMMANDS = ("serve", "generate", "chat")
ENGINE = (
    "--block-size",
    "--num-blocks",
    "--max-num-seqs",
    "--max-batched-tokens",
    "--max-model-len",
    "--threads",
)
HUGE = "1" + "0" * 30


def run(*argv: str) -> int:
    """main() with argparse's own exits as codes."""
    try:
        return main(argv)
    except SystemExit as exit:
        return int(exit.code or 0)


@pytest.mark.parametrize("command", [(), ("bench",), ("bench", "attention"), *((name,) for name in COMMANDS)])
def test_help_is_instant(command: tuple[str, ...]) -> None:
    """Help loads neither torch nor a web framework."""
    code = (
        "import sys; from octavo.cli.main import main\n"
        f"try: main({[*command, '--help']})\n"
        "except SystemExit: pass\n"
        "print({'torch', 'fastapi', 'rich', 'numpy'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "usage: octavo" in done.stdout
    assert done.stderr.strip() == "set()"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_each_option(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every engine option stands in the help of every command, and no option is without a text."""
    assert run(command, "--help") == 0
    text = capsys.readouterr().out
    for option in (*ENGINE, "--dtype", "--kv-dtype", "--weights", "--kv-memory", "--no-prefix-caching"):
        assert option in text
    lines = text.partition("options:")[2].splitlines()
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("  -") and len(line.split("  ")) < 3:
            assert after.startswith(" " * 20), f"{line} has no explanation"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """--version prints the package's version."""
    assert run("--version") == 0
    assert capsys.readouterr().out == f"octavo {__version__}\n"


@pytest.mark.parametrize("argv", [(), ("fly",), ("generate",), ("generate", "--prompt", "a", "--fly")])
def test_wrong_usage(argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """No command, an unknown one, no prompt, an unknown option: usage and exit code 2."""
    assert run(*argv) == 2
    assert "usage: octavo" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0", "-1", HUGE, "1.5", "many", ""])
@pytest.mark.parametrize(
    ("command", "option"),
    [
        *((command, option) for command in COMMANDS for option in ENGINE),
        ("serve", "--port"),
        ("serve", "--max-queue"),
        ("generate", "--n"),
        ("generate", "--max-tokens"),
        ("chat", "--max-tokens"),
    ],
)
def test_bad_integers(
    engine: FakeEngineThread, capsys: pytest.CaptureFixture[str], command: str, option: str, value: str
) -> None:
    """0, negative, huge and not whole: refused by the option's name before anything is loaded."""
    prompt = ["--prompt", "a"] if command == "generate" else []
    assert run(command, *prompt, f"{option}={value}") == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"argument {option}: " in last
    assert engine.configs == []


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--temperature", "-1"),
        ("--temperature", "nan"),
        ("--temperature", "inf"),
        ("--temperature", "hot"),
        ("--top-p", "0"),
        ("--top-p", "1.1"),
        ("--min-p", "-0.1"),
        ("--min-p", "2"),
        ("--top-k", "-1"),
        ("--seed", "-1"),
        ("--seed", HUGE),
        ("--dtype", "int4"),
        ("--schedule", "random"),
        ("--preemption", "drop"),
        ("--dtype", "int8"),
        ("--kv-dtype", "int4"),
        ("--weights", "q4_0"),
    ],
)
def test_bad_values(
    engine: FakeEngineThread, capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    """Sampling options out of range and unknown number formats are refused by name."""
    assert run("chat", f"{option}={value}") == 2
    assert f"argument {option}: " in capsys.readouterr().err
    assert engine.configs == []


def test_blocks_or_memory(engine: FakeEngineThread, capsys: pytest.CaptureFixture[str]) -> None:
    """--num-blocks and --kv-memory say the same thing twice: only one of them may be given."""
    assert run("chat", "--num-blocks", "5", "--kv-memory", "1GiB") == 2
    assert "--num-blocks" in capsys.readouterr().err


def test_swap_needs_somewhere_to_go(engine: FakeEngineThread, capsys: pytest.CaptureFixture[str]) -> None:
    """--preemption swap without --host-cache is refused before anything is loaded, and says what to give."""
    assert run("chat", "--preemption", "swap") == 2
    assert "host_cache, which is not set" in capsys.readouterr().err
    assert engine.configs == []


def test_engine_options_reach_the_engine(engine: FakeEngineThread) -> None:
    """Each option sets its field of EngineConfig; without options the engine's own defaults hold."""
    options = {
        "--dtype": "bfloat16",
        "--block-size": "8",
        "--num-blocks": "99",
        "--max-num-seqs": "3",
        "--max-batched-tokens": "64",
        "--max-model-len": "77",
        "--kv-dtype": "int8",
        "--threads": "5",
        "--speculate": "4",
        "--draft-model": "smaller",
        "--schedule": "fair",
        "--preemption": "recompute",
    }
    flat = [text for pair in options.items() for text in pair]
    assert run("generate", "some/dir", "--prompt", "a", *flat, "--no-prefix-caching") == 0
    assert run("generate", "--prompt", "a", "--kv-memory", "1GiB", "--weights", "int8") == 0
    assert run("generate", "--prompt", "a") == 0
    first, second, third = engine.configs
    assert first == type(third)(
        "some/dir", "bfloat16", 8, 99, None, 3, 64, 77, False, kv_dtype="int8", threads=5, speculate=4,
        draft_model="smaller", schedule="fair", preemption="recompute",
    )  # fmt: skip
    assert second == type(third)(kv_memory="1GiB", weights="int8")
    assert third == type(third)()


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (OctavoError("the file ends early"), "octavo: error: the file ends early"),
        (InvalidRequest("too many", param="num_blocks"), "octavo: error: too many (--num-blocks)"),
        (MemoryError(), "octavo: error: out of memory; lower --kv-memory or --num-blocks"),
        (InvalidRequest("raise --num-blocks", param="num_blocks"), "octavo: error: raise --num-blocks"),
    ],
)
def test_errors_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, shown: str
) -> None:
    """A typed error while loading is one line on stderr that names the option, and exit code 2."""

    def fail(_: object) -> None:
        raise error

    monkeypatch.setattr("octavo.cli.loading.load_engine", fail)
    assert run("generate", "--prompt", "a") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.strip().splitlines() == ["loading smollm2 ...", shown]


@pytest.mark.parametrize("options", [["no/such/model.gguf"], ["--kv-memory", "lots"]])
def test_real_engine_refuses(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The real loader's refusals are typed: a missing file gives one line and no traceback."""
    assert run("generate", "no/such/model.gguf", "--prompt", "a", *options[1:]) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("octavo: error: ")


def test_interrupt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C while loading ends with exit code 130 and no traceback."""

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("octavo.cli.loading.load_engine", interrupt)
    assert run("chat") == 130
    assert "Traceback" not in capsys.readouterr().err


def test_defaults_are_the_engines() -> None:
    """The parser's defaults are those of EngineConfig, so that the two cannot drift apart."""
    from octavo.cli.main import build_parser
    from octavo.engine.config import EngineConfig

    assert engine_config(build_parser().parse_args(["chat"])) == EngineConfig()
