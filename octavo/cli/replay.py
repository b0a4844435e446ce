"""`octavo replay`: look again at what `octavo serve --record` wrote."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from octavo.cli.options import whole_number
from octavo.cli.serve import bind


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers."""
    parser = commands.add_parser(
        "replay",
        help="show a recorded memory map in the browser",
        description="Serve the memory map's page over a recording of `octavo serve --record FILE`, until "
        "Ctrl-C. No model is loaded.",
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="the recording; .gz is read as it is")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port", type=whole_number(1, 65535), default=8000, help="port to listen on (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT."""
    with bind(args.host, args.port) as sock:
        import uvicorn

        from octavo.server.replay import create_replay_app

        app = create_replay_app(args.file)
        print(f"replaying {args.file} at http://{args.host}:{args.port}/ (Ctrl-C stops)", flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run(sockets=[sock])
    return 0
