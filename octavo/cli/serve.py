"""`octavo serve`: the OpenAI-compatible HTTP server."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from octavo.cli.errors import CommandError
from octavo.cli.loading import SHUTDOWN_SECONDS, Rows, running_engine
from octavo.cli.options import add_engine_options, add_model, whole_number

if TYPE_CHECKING:
    from fastapi import FastAPI

KEY_VARIABLE = "OCTAVO_API_KEY"
GRACE_SECONDS = 3.0
"""How long open answers may go on after a signal."""
ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}
LOOPBACK = ("127.", "::1", "localhost")


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers."""
    parser = commands.add_parser(
        "serve",
        help="answer OpenAI-style HTTP requests",
        description="Load a model and answer OpenAI-style HTTP requests (/v1/completions, "
        "/v1/chat/completions, /v1/models, /health) until Ctrl-C. Any OpenAI client works: "
        "point its base URL here.",
    )
    add_model(parser)
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
    group.add_argument(
        "--api-key",
        metavar="KEY",
        help="refuse requests that do not carry this key as 'Authorization: Bearer KEY'. Other users of this "
        f"machine can see a command line, so better set the variable {KEY_VARIABLE} (default: no key)",
    )
    group.add_argument(
        "--max-queue",
        type=whole_number(1, 1_000_000),
        default=512,
        metavar="N",
        help="most sequences that may wait beyond --max-num-seqs; more get a 429 (default: %(default)s)",
    )
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; then finish or cut open answers and return."""
    from rich.console import Console

    api_key = _api_key(args)
    # Before the model is loaded, so that a taken port is known at once and not a minute later.
    with bind(args.host, args.port) as sock:
        # uvicorn raises its signal again when it has shut down. As an exception that unwinds through
        # running_engine, which stops the engine's thread; the default for SIGTERM would kill us first.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        from octavo.server import ServerConfig, create_app  # imports torch

        console = Console()
        with running_engine(args, console, _rows(args, api_key)) as thread:
            config = ServerConfig(api_key=api_key, max_open_sequences=args.max_num_seqs + args.max_queue)
            app = create_app(thread, config)

            def ready() -> None:
                text = ready_text(args.host, args.port, api_key is not None)
                console.print(text, markup=False, highlight=False, soft_wrap=True)

            try:
                _listen(app, sock, ready, lambda: thread.shutdown(timeout=SHUTDOWN_SECONDS))
            except KeyboardInterrupt:
                console.print("stopping ...")
    return 0


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, not listening yet. Raises CommandError where that cannot be."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind)
    except OSError as error:
        raise CommandError(f"cannot listen on --host {host}: {error.strerror or error}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise _taken(host, port, error) from None
    return sock


def ready_text(host: str, port: int, has_key: bool) -> str:
    """What to print when requests are answered: the URL and a first request to try."""
    name = ANY_HOST.get(host, host)
    url = f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"
    key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if has_key else ""
    return (
        f"listening on {url} (Ctrl-C stops)\n"
        f"try: curl {url}/v1/completions{key} "
        """-d '{"prompt": "A book is", "max_tokens": 32}'"""
    )


def _listen(app: FastAPI, sock: socket.socket, ready: Callable[[], None], stop: Callable[[], None]) -> None:
    """Answer requests until a signal; then let open ones finish, and `stop` when they take too long."""
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            ready()

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            # With the engine stopped, what is still open ends with an error body or event of its own;
            # uvicorn alone would cut the connections.
            loop = asyncio.get_running_loop()
            timer = loop.call_later(GRACE_SECONDS, loop.run_in_executor, None, stop)
            await super().shutdown(sockets)
            timer.cancel()

    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=int(GRACE_SECONDS + SHUTDOWN_SECONDS),
    )
    host, port = sock.getsockname()[:2]
    try:
        Server(config).run(sockets=[sock])
    except OSError as error:
        # Two servers that load at the same time can both bind; the second cannot listen.
        raise _taken(host, port, error) from None


def _taken(host: str, port: int, error: OSError) -> CommandError:
    return CommandError(
        f"cannot listen on {host} port {port}: {error.strerror or error}. Choose another --port or --host"
    )


def _api_key(args: argparse.Namespace) -> str | None:
    key = args.api_key if args.api_key is not None else os.environ.get(KEY_VARIABLE)
    if key is None:
        return None
    if not key.strip() or key != key.strip():
        raise CommandError(f"--api-key (or {KEY_VARIABLE}) must not be empty or have space around it")
    return key


def _rows(args: argparse.Namespace, api_key: str | None) -> Rows:
    if api_key is not None:
        key = "asked of every request but /health"
    elif args.host.startswith(LOOPBACK):
        key = "off: only this machine can connect"
    else:
        key = "OFF, and other machines can connect: set --api-key"
    return [("queue", f"up to {args.max_queue} sequences wait (--max-queue)"), ("API key", key)]
