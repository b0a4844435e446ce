"""`octavo serve`: the OpenAI-compatible HTTP server.

bind -> listen (ready: 503) -> load -> ready: 200 -> signal -> drain -> engine ends -> close
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli.errors import CommandError
from octavo.cli.loading import Rows, running_engine
from octavo.cli.options import add_engine_options, add_model
from octavo.cli.serve_options import KEY_VARIABLE, add_server_options

if TYPE_CHECKING:
    from rich.console import Console

    from octavo.server import ServerConfig
    from octavo.server.keys import ApiKey
    from octavo.server.run import HttpServer, Tls

log = logging.getLogger("octavo.server")
ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}
LOOPBACK = ("127.", "::1", "localhost")


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers."""
    parser = commands.add_parser(
        "serve",
        help="answer OpenAI-style HTTP requests",
        description="Load a model and answer OpenAI-style HTTP requests (/v1/completions, "
        "/v1/chat/completions, /v1/responses, /v1/models, /health and more) until Ctrl-C. Any OpenAI client "
        "works: point its base URL here.",
    )
    add_model(parser)
    add_server_options(parser)
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; then finish or cut open answers and return."""
    tls, keys = _tls(args), _keys(args)
    # Before the model is loaded, so that a taken port is known at once and not a minute later.
    with bind(args.host, args.port) as sock, _sigterm_as_interrupt():
        from octavo.server import logs

        with logs.configured(args.log_format):
            _serve(args, sock, tls, keys)
    return 0


def _serve(args: argparse.Namespace, sock: socket.socket, tls: Tls | None, keys: tuple[ApiKey, ...]) -> None:
    """Listen, load, answer until a signal."""
    from rich.console import Console

    from octavo.engine.recording import recording  # imports torch
    from octavo.server import create_app
    from octavo.server.run import HttpServer

    console = Console()
    app = create_app(None, _config(args, keys))
    server = HttpServer(app, sock, tls)
    try:
        _start(server, sock)
        args.tenant_weights = _weights(args, keys)
        with running_engine(args, console, _rows(args, keys)) as thread, ExitStack() as stack:
            app.state.context.attach(thread)
            if args.record is not None:
                stack.enter_context(recording(app.state.feed, Path(args.record)))
            text = ready_text(args.host, args.port, bool(keys), tls is not None)
            console.print(text, markup=False, highlight=False, soft_wrap=True)
            log.info("ready", extra={"fields": {"model": args.model, "host": args.host, "port": args.port}})
            _wait(server, console, args.drain_timeout)
    finally:
        # The engine has ended: what was still open has got its last event by now.
        server.stop()
    log.info("stopped")


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """As an exception SIGTERM unwinds like SIGINT, which stops the engine's thread and the server's."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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


def ready_text(host: str, port: int, has_key: bool, has_tls: bool = False) -> str:
    """What to print when requests are answered: the URL and a first request to try."""
    name = ANY_HOST.get(host, host)
    scheme = "https" if has_tls else "http"
    url = f"{scheme}://[{name}]:{port}" if ":" in name else f"{scheme}://{name}:{port}"
    key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if has_key else ""
    return (
        f"listening on {url} (Ctrl-C stops)\n"
        f"try: curl {url}/v1/completions{key} "
        """-d '{"prompt": "A book is", "max_tokens": 32}'"""
    )


def _start(server: HttpServer, sock: socket.socket) -> None:
    try:
        server.start()
    except OSError as error:
        # Two servers that load at the same time can both bind; the second cannot listen.
        host, port = sock.getsockname()[:2]
        raise _taken(host, port, error) from None


def _wait(server: HttpServer, console: Console, seconds: float) -> None:
    """Serve until a signal; then let open answers finish. A second signal ends that at once."""
    try:
        server.wait()
    except KeyboardInterrupt:
        try:
            log.info("draining", extra={"fields": {"seconds": seconds}})
            console.print(f"stopping: open requests have {seconds:g} s to finish (--drain-timeout)")
            if not server.drain(seconds):
                console.print("stopping: some have not finished and are ended with an error")
        except KeyboardInterrupt:
            console.print("stopping at once")


def _taken(host: str, port: int, error: OSError) -> CommandError:
    return CommandError(
        f"cannot listen on {host} port {port}: {error.strerror or error}. Choose another --port or --host"
    )


def _config(args: argparse.Namespace, keys: tuple[ApiKey, ...]) -> ServerConfig:
    from octavo.server import ServerConfig

    return ServerConfig(
        keys=keys,
        max_open_sequences=args.max_num_seqs + args.max_queue,
        max_body_memory=args.max_body_memory * 2**20,
        request_seconds=args.request_timeout,
        cors_origins=tuple(args.cors_origin),
        log_prompts=args.log_prompts,
        tool_format=args.tool_format,
        memory_map=_shows_map(args, keys),
        show_text=args.show_text,
    )


def _shows_map(args: argparse.Namespace, keys: tuple[ApiKey, ...]) -> bool:
    """Without a key the map is for this machine only."""
    return args.memory_map and (bool(keys) or args.host.startswith(LOOPBACK))


def _map_row(args: argparse.Namespace, keys: tuple[ApiKey, ...]) -> str:
    if not args.memory_map:
        return "off (--no-memory-map)"
    if not _shows_map(args, keys):
        return "off: other machines can connect, and there is no key (--api-key)"
    text = "WITH the text of requests (--show-text)" if args.show_text else "without text (--show-text)"
    return f"on, at /, {text}"


def _keys(args: argparse.Namespace) -> tuple[ApiKey, ...]:
    secret = args.api_key if args.api_key is not None else os.environ.get(KEY_VARIABLE)
    if args.api_keys is None and secret is None:
        return ()
    from octavo.server.keys import ApiKey, KeyFileError, read_keys  # imports torch

    if args.api_keys is not None:
        if secret is not None:
            raise CommandError(f"give --api-keys or --api-key (or {KEY_VARIABLE}), not both")
        return read_keys(Path(args.api_keys))
    assert secret is not None
    try:
        return (ApiKey.from_secret(secret),)
    except KeyFileError:
        raise CommandError(
            f"--api-key (or {KEY_VARIABLE}) must not be empty or have space around it"
        ) from None


def _weights(args: argparse.Namespace, keys: tuple[ApiKey, ...]) -> dict[str, float]:
    """Each key's share, for the schedule that knows shares."""
    if args.schedule == "fair":
        return {key.name: key.weight for key in keys}
    for key in keys:
        if key.weight != 1:
            raise CommandError(
                f"key {key.name!r} has weight {key.weight:g}, which only --schedule fair goes by, not "
                f"{args.schedule}"
            )
    return {}


def _tls(args: argparse.Namespace) -> Tls | None:
    if args.tls_cert is None and args.tls_key is None:
        return None
    if args.tls_cert is None or args.tls_key is None:
        raise CommandError("--tls-cert and --tls-key go together: give both files")
    from octavo.server.run import Tls

    tls = Tls(Path(args.tls_cert), Path(args.tls_key))
    tls.check()
    return tls


def _rows(args: argparse.Namespace, keys: tuple[ApiKey, ...]) -> Rows:
    if keys:
        key = f"{len(keys)} ({', '.join(key.name for key in keys[:5])}{' ...' if len(keys) > 5 else ''})"
        key += ", asked of every request but /health"
    elif args.host.startswith(LOOPBACK):
        key = "off: only this machine can connect"
    else:
        key = "OFF, and other machines can connect: set --api-key or --api-keys"
    return [
        ("queue", f"up to {args.max_queue} sequences wait (--max-queue)"),
        ("request bodies", f"up to {args.max_body_memory} MiB held at once (--max-body-memory)"),
        (
            "time limits",
            f"{args.request_timeout:g} s a request, {args.drain_timeout:g} s to finish at the end",
        ),
        ("API key", key),
        ("TLS", "on" if args.tls_cert else "off (--tls-cert, --tls-key)"),
        ("CORS", ", ".join(args.cors_origin) or "off: no web page may read answers (--cors-origin)"),
        ("memory map", _map_row(args, keys)),
        ("recording", args.record or "off (--record)"),
        ("tool calls", f"{args.tool_format} (--tool-format)"),
        ("log", f"{args.log_format}, {'WITH' if args.log_prompts else 'without'} prompts and answers"),
    ]
