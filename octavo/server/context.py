"""What the routes share: the engine, the settings, the gate, and threads for slow text work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from octavo.server.admission import Gate
from octavo.server.config import ServerConfig
from octavo.server.errors import EngineUnavailable, UnknownModel

if TYPE_CHECKING:
    from octavo.engine.thread import EngineThread

P = ParamSpec("P")
T = TypeVar("T")

TEXT_THREADS = 2


class ServerContext:
    """One server's shared state. Used from the event loop only; `off_loop` is the way out of it."""

    def __init__(self, engine: EngineThread, config: ServerConfig) -> None:
        self.engine = engine
        self.config = config
        self.gate = Gate(config.max_open_sequences)
        self._threads = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="octavo-text")

    @property
    def model_name(self) -> str:
        """The name under which the model is served."""
        return self.engine.engine.model_name

    def check(self, model: str | None) -> None:
        """Raise EngineUnavailable when no engine runs, UnknownModel for any name but the served one."""
        if not self.engine.alive:
            raise EngineUnavailable("the engine is not running; see /health and the server's log")
        if model is not None:
            self.check_name(model)

    def check_name(self, model: str) -> None:
        """Raise UnknownModel for any name but the served one."""
        if model != self.model_name:
            raise UnknownModel(f"model {model[:200]!r} is not served here; it has {self.model_name!r}")

    async def off_loop(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` in a thread. A caller that is cancelled does not wait for it."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: function(*args, **kwargs))

    def close(self) -> None:
        """Stop the threads; work that has not started is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)
