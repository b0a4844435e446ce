"""What the routes share: the engine and its life cycle, the settings, the gate, threads for slow text work.

loading --attach()--> serving --drain()--> draining --cut()--> cut
                         |
                         +-- the engine's thread ends or its step hangs: dead, stuck
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from octavo.server.admission import Gate, Room
from octavo.server.config import ServerConfig
from octavo.server.errors import EngineUnavailable, UnknownModel

if TYPE_CHECKING:
    from octavo.engine.thread import EngineThread

P = ParamSpec("P")
T = TypeVar("T")

TEXT_THREADS = 2
SLOW_THREADS = 2
LARGE_BYTES = 256 * 1024
"""The text of a larger body may take a second to look at and to tokenize."""
QUICK_BYTES = 16 * 1024
"""Reading what a body of this size says takes half a millisecond at most, and tokenizing it ten."""
STUCK_SECONDS = 300.0
"""A single step of the engine that takes longer than this counts as hung."""


class ServerContext:
    """One server's shared state. Used from the event loop; `off_loop` is the way out of it.

    `attach`, `drain` and `cut` may be called from any thread: each sets one attribute.
    """

    def __init__(self, engine: EngineThread | None, config: ServerConfig) -> None:
        self.config = config
        self.gate = Gate(config.max_open_sequences)
        self.bodies = Room(config.max_body_memory)  # bytes of request bodies
        self.under_way = 0  # POST requests, from their first byte to their last
        self._engine = engine
        self._hooks: list[Callable[[EngineThread], None]] = []
        self._draining = False
        self._cut = False
        self._threads = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="octavo-text")
        self._slow_threads = ThreadPoolExecutor(SLOW_THREADS, thread_name_prefix="octavo-slow")

    # -- life cycle ----------------------------------------------------------------------------

    def when_attached(self, hook: Callable[[EngineThread], None]) -> None:
        """Call `hook` with the engine before the first request is taken; now, if it is here already."""
        if self._engine is not None:
            hook(self._engine)
        else:
            self._hooks.append(hook)

    def attach(self, engine: EngineThread) -> None:
        """The model is loaded: requests are taken from now on."""
        for hook in self._hooks:
            hook(engine)
        self._engine = engine

    def drain(self) -> None:
        """Take no more requests; those under way go on."""
        self._draining = True

    def cut(self) -> None:
        """End what is still under way with an error; for an engine that no longer can."""
        self._cut = True

    @property
    def engine(self) -> EngineThread:
        """The engine. Raises EngineUnavailable while the model is loading."""
        if self._engine is None:
            raise EngineUnavailable("the model is still loading; ask /health/ready when it is")
        return self._engine

    @property
    def state(self) -> str:
        """loading, serving, draining, stuck or dead."""
        if self._engine is None:
            return "draining" if self._draining else "loading"
        if not self._engine.alive:
            return "dead"
        if self._engine.step_seconds > STUCK_SECONDS:
            return "stuck"
        return "draining" if self._draining else "serving"

    @property
    def running(self) -> bool:
        """Whether requests under way can still be finished."""
        return not self._cut and self.state in ("serving", "draining")

    # -- requests ------------------------------------------------------------------------------

    @property
    def model_name(self) -> str:
        """The name under which the model is served."""
        return self.engine.engine.model_name

    def check(self, model: str | None) -> None:
        """Raise EngineUnavailable when no requests are taken, UnknownModel for another model's name."""
        state = self.state
        if state != "serving":
            raise EngineUnavailable(_REASONS[state])
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

    async def off_loop_slow(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The same for what may take seconds, such as compiling a form: the others do not queue behind it."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._slow_threads, lambda: function(*args, **kwargs))

    def off_loop_for(self, body_bytes: int, *, quick: bool = False) -> Callable[..., Awaitable[Any]]:
        """The way off the loop for a request of that size: small ones do not queue behind large ones. quick:
        no text is tokenized, so that a small one stays: threads would hand the interpreter's lock to each
        other and to the engine for longer than the work takes."""
        if quick and body_bytes <= QUICK_BYTES:
            return _here
        return self.off_loop_slow if body_bytes > LARGE_BYTES else self.off_loop

    def close(self) -> None:
        """Stop the threads; work that has not started is dropped."""
        for threads in (self._threads, self._slow_threads):
            threads.shutdown(wait=False, cancel_futures=True)


async def _here(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return function(*args, **kwargs)


_REASONS = {
    "loading": "the model is still loading; ask /health/ready when it is",
    "draining": "the server is shutting down and takes no more requests",
    "stuck": f"a step of the engine has run for more than {STUCK_SECONDS:.0f} s; see the server's log",
    "dead": "the engine is not running; see /health and the server's log",
}
