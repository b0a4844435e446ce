"""The options of `octavo serve` that are about HTTP."""

from __future__ import annotations

import argparse

from octavo.cli.options import number, whole_number

KEY_VARIABLE = "OCTAVO_API_KEY"


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Where to listen, who may ask, how long things may take, and what is logged."""
    group = parser.add_argument_group("server options")
    group.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; 127.0.0.1 is this machine only, 0.0.0.0 any network "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--port", type=whole_number(1, 65535), default=8000, help="port to listen on (default: %(default)s)"
    )
    _add_access_options(group)
    _add_map_options(group)
    group.add_argument(
        "--max-queue",
        type=whole_number(1, 1_000_000),
        default=512,
        metavar="N",
        help="most sequences that may wait beyond --max-num-seqs; more get a 429 (default: %(default)s)",
    )
    group.add_argument(
        "--max-body-memory",
        type=whole_number(16, 1_000_000),
        default=256,
        metavar="MIB",
        help="most memory for request bodies at once, each held until its request ends; one that does not "
        "fit gets a 503 (default: %(default)s)",
    )
    group.add_argument(
        "--request-timeout",
        type=number(0, above=True),
        default=3600.0,
        metavar="SECONDS",
        help="end a request that takes longer, waiting included (default: %(default)g)",
    )
    group.add_argument(
        "--drain-timeout",
        type=number(0),
        default=30.0,
        metavar="SECONDS",
        help="after SIGTERM or Ctrl-C, how long open requests may go on; a second signal ends them at once "
        "(default: %(default)g)",
    )
    group.add_argument(
        "--tool-format",
        choices=("auto", "hermes", "llama"),
        default="auto",
        help="how the model writes tool calls; auto looks at its chat template (default: %(default)s)",
    )
    group.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="form of the log on standard error (default: %(default)s)",
    )
    group.add_argument(
        "--log-prompts",
        action="store_true",
        help="write prompts and answers to the log, which otherwise never holds any of them",
    )


def _add_access_options(group: argparse._ArgumentGroup) -> None:
    """Who may ask, and how that is kept safe."""
    group.add_argument(
        "--api-key",
        metavar="KEY",
        help="refuse requests that do not carry this key as 'Authorization: Bearer KEY'. Other users of this "
        f"machine can see a command line, so better set the variable {KEY_VARIABLE} (default: no key)",
    )
    group.add_argument(
        "--api-keys",
        metavar="FILE",
        help="a TOML file of keys, each with a name and limits of its own; docs/server.md has its form",
    )
    group.add_argument(
        "--tls-cert",
        metavar="FILE",
        help="serve HTTPS with this certificate chain, a PEM file; with --tls-key",
    )
    group.add_argument("--tls-key", metavar="FILE", help="the private key of --tls-cert, a PEM file")
    group.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let web pages from this origin, such as https://example.org, read answers; may be given "
        "several times, * is any (default: none)",
    )


def _add_map_options(group: argparse._ArgumentGroup) -> None:
    """The memory map, and what it may show."""
    group.add_argument(
        "--no-memory-map",
        dest="memory_map",
        action="store_false",
        help="do not serve the live map of the KV cache at /",
    )
    group.add_argument(
        "--show-text",
        action="store_true",
        help="let the memory map show what the blocks hold: the text of everybody's requests",
    )
    group.add_argument(
        "--record",
        metavar="FILE",
        help="write what the memory map shows, without text, to FILE, for `octavo replay FILE`",
    )
