"""The parser of the `octavo` command, and the one place that turns errors into lines and exit codes.

Exit codes: 0 done, 1 the output was closed early, 2 refused with one line on stderr, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from octavo import __version__
from octavo.cli import bench, chat, generate, plan, replay, serve, top
from octavo.errors import InvalidRequest, OctavoError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    # Before torch is imported. OpenMP threads otherwise spin while they wait for each other, which costs
    # a machine that does anything else several times its speed; whoever set a policy keeps it.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        code: int = args.run(args)
        return code
    except OctavoError as error:
        print(f"octavo: error: {_with_option(error, args)}", file=sys.stderr)
        return 2
    except MemoryError:
        print("octavo: error: out of memory; lower --kv-memory or --num-blocks", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("octavo: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # `octavo generate | head`: the interpreter must not write to the closed pipe once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def build_parser() -> argparse.ArgumentParser:
    """The parser with all commands; each sets `run`, a function of the parsed options."""
    parser = argparse.ArgumentParser(
        prog="octavo",
        description="Run a language model on this machine: as a server, on a list of prompts, or to talk to.",
        epilog="Try `octavo chat` first. `octavo COMMAND --help` explains the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"octavo {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (serve, generate, chat, plan, top, replay, bench):
        command.add_parser(commands)
    return parser


def _with_option(error: OctavoError, args: argparse.Namespace) -> str:
    """The message, with the option's name where the error knows the field and does not say the option."""
    message = str(error)
    if isinstance(error, InvalidRequest) and error.param is not None and hasattr(args, error.param):
        option = "--" + error.param.replace("_", "-")
        if error.param != "model" and option not in message:
            return f"{message} ({option})"
    return message
