"""The HTTP server of a process: uvicorn on a thread of its own, so that the main thread has the signals.

main thread                        server thread (one event loop)
start()  ------------------------> listens; /health/ready says 503
load the model, context.attach()   /health/ready says 200
drain()  no new requests, waits  -> answers what is under way
stop()   ------------------------> closes; joined
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from octavo.errors import InvalidRequest
from octavo.server.context import ServerContext
from octavo.server.protocol import BoundedProtocol

logger = logging.getLogger("octavo.server")

CLOSE_SECONDS = 5
"""How long answers may take to leave once everything is over."""
_POLL_SECONDS = 0.02
_WAIT_SECONDS = 3600.0


@dataclass(frozen=True)
class Tls:
    """Certificate chain and private key, as PEM files."""

    certificate: Path
    key: Path

    def check(self) -> None:
        """Raise InvalidRequest when the pair cannot be used."""
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as error:
            raise InvalidRequest(
                f"--tls-cert {self.certificate} and --tls-key {self.key} cannot be used: {error}"
            ) from None


class HttpServer:
    """`app` on a bound socket. start(), then drain() where wanted, then stop()."""

    def __init__(self, app: FastAPI, sock: socket.socket, tls: Tls | None = None) -> None:
        files = {} if tls is None else {"ssl_certfile": tls.certificate, "ssl_keyfile": str(tls.key)}
        config = uvicorn.Config(
            app,
            http=BoundedProtocol,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=CLOSE_SECONDS,
            **files,  # type: ignore[arg-type]
        )
        self._context: ServerContext = app.state.context
        self._sock = sock
        self._server = uvicorn.Server(config)
        self._failure: BaseException | None = None
        self._ended = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="octavo-http", daemon=True)

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop that answers, once it runs."""
        return self._loop

    def start(self) -> None:
        """Listen. Raises OSError when the socket cannot."""
        self._thread.start()
        while not self._server.started and not self._ended.wait(_POLL_SECONDS):
            pass
        if not self._server.started:
            raise self._failure or OSError("the HTTP server did not start")

    def wait(self) -> None:
        """Until the server ends by itself, which it does not, or a signal raises KeyboardInterrupt."""
        # Not Thread.join: interrupted by a signal, Python 3.11's takes the thread for ended.
        while not self._ended.wait(_WAIT_SECONDS):
            pass
        if self._failure is not None:
            raise self._failure

    def drain(self, seconds: float) -> bool:
        """Take no more requests and wait for those under way, at most `seconds`; whether all ended."""
        self._context.drain()
        end = time.monotonic() + seconds
        while self._context.under_way and not self._ended.is_set():
            if time.monotonic() > end:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def stop(self) -> None:
        """Close every connection and end the thread. Does nothing when that is done."""
        self._context.cut()
        self._server.should_exit = True
        if self._thread.ident is not None:
            self._ended.wait()
            self._thread.join()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._server.serve(sockets=[self._sock])

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # also the SystemExit that uvicorn raises
            self._failure = error
        finally:
            self._ended.set()
