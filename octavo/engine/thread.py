"""The engine on a thread of its own, for a server: requests stream out on asyncio loops.

    event loop --inbox--> engine thread: add, abort, step --one call a loop and step--> one queue a request
         +-> threads that compile forms, before anything is queued

Every other engine call happens on that thread. If it ends with an error, open streams get the error at once.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from octavo.engine.engine import Engine
from octavo.engine.errors import EngineDead
from octavo.engine.intake import Resolved, slow_to_resolve
from octavo.engine.origin import Origin
from octavo.engine.outputs import RequestDelta
from octavo.engine.params import SamplingParams

log = logging.getLogger(__name__)
NOWHERE = Origin()
T = TypeVar("T")
RESOLVING_THREADS = 2
"""For requests that take long to check; further ones wait for these, and nobody else does."""

KEPT_STEPS = 16
"""Steps whose deltas reach a caller together where nobody reads the tokens as they come: each delivery takes
the event loop as long as a hundredth of a step, and there is one for every sequence. A caller that wants no
more of an answer has the engine compute so many tokens of it too many."""


@dataclass(eq=False)
class _Stream:
    """A consumer's end: deltas are put on `queue` by the consumer's own loop. eager: each as soon as it is
    there; else they are `kept` on the engine's thread, those of KEPT_STEPS steps in one."""

    loop: asyncio.AbstractEventLoop
    eager: bool = True
    queue: asyncio.Queue[RequestDelta | Exception] = field(default_factory=asyncio.Queue)
    request_id: int | None = None
    closed: bool = False
    arrived: float = field(default_factory=time.monotonic)
    kept: RequestDelta | None = None
    num_kept: int = 0

    def due(self, delta: RequestDelta) -> list[RequestDelta]:
        """A step's delta has come: what is to be delivered now, if anything."""
        if self.eager:
            return [delta]
        kept, self.kept = self.kept, None
        if delta.error is not None:  # nothing is added to an error, nor an error to anything
            return [delta] if kept is None else [kept, delta]
        if kept is None:
            kept, self.num_kept = delta, 1
        else:
            kept.add(delta)
            self.num_kept += 1
        if kept.finished or self.num_kept >= KEPT_STEPS:
            return [kept]
        self.kept = kept
        return []

    def put(self, item: RequestDelta | Exception) -> None:
        """From the engine thread. A loop that has gone has nobody left to tell."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.queue.put_nowait, item)

    async def get(self) -> RequestDelta | Exception:
        """What comes next: where the consumer's loop fell behind, all that its request gained meanwhile."""
        item = await self.queue.get()
        while not (self.queue.empty() or isinstance(item, Exception) or item.error is not None):
            following = self.queue.get_nowait()
            if isinstance(following, Exception) or following.error is not None:
                self.queue.put_nowait(following)  # nothing follows an error
                break
            item.add(following)
        return item


def _put_all(items: list[tuple[_Stream, RequestDelta]]) -> None:
    """On the consumers' loop."""
    for stream, delta in items:
        stream.queue.put_nowait(delta)


class EngineThread:
    """Runs an engine until shutdown(). start() once; stream() from any event loop."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[int, _Stream] = {}  # engine thread only
        self._thread = threading.Thread(target=self._main, name="octavo-engine", daemon=True)
        self._lock = threading.Lock()  # guards _dead against a call put after the inbox was emptied
        self._dead: Exception | None = None
        self._resolving = ThreadPoolExecutor(RESOLVING_THREADS, "octavo-resolve")
        self._step_began: float | None = None  # while a step runs

    @property
    def alive(self) -> bool:
        """Whether requests are served."""
        return self._thread.is_alive() and self._dead is None

    @property
    def step_seconds(self) -> float:
        """How long the present step has been running; 0 between steps. A huge number is a hung engine."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def start(self) -> None:
        """Start the thread."""
        self.engine.runner.keep_ahead()  # before the first request comes
        self._thread.start()

    def shutdown(self, timeout: float | None = None) -> None:
        """End the thread after its step; open streams get EngineDead. Raises EngineDead on a time-out."""
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise EngineDead(f"the engine's step did not end within {timeout} s")

    def stats(self) -> dict[str, int | str]:
        """Sequences running and waiting, what a block is and blocks by state, those of lower tiers where
        there are any.
        Read without a lock: each number is a recent one, together they may straddle a step."""
        pool, scheduler, budget = self.engine.pool.stats(), self.engine.scheduler, self.engine.budget
        lower: dict[str, int] = {}
        for name, tier in (("host", pool.host), ("disk", pool.disk)):
            if tier.slots:
                lower |= {
                    f"{name}_total": tier.slots,
                    f"{name}_held": tier.held,
                    f"{name}_cached": tier.cached,
                }
        return {
            "num_running": len(scheduler.running),
            "num_waiting": len(scheduler.waiting),
            "kv_dtype": self.engine.kv_format.dtype,
            "block_size": budget.block_size,
            "bytes_per_block": budget.bytes_per_block,
            "blocks_total": pool.num_blocks,
            "blocks_free": pool.free,
            "blocks_held": pool.held,
            "blocks_cached": pool.cached,
            **lower,
        }

    def ask(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` on the engine's thread before its next step, from any thread. Raises EngineDead."""
        answer: Future[T] = Future()

        def run() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(function())
            except Exception as error:
                answer.set_exception(error)

        self._call(run)
        return answer

    async def stream(
        self, prompt_token_ids: list[int], params: SamplingParams, origin: Origin = NOWHERE
    ) -> AsyncGenerator[RequestDelta, None]:
        """Deltas of one request until it is finished, those of several steps in one where the caller falls
        behind, or where nobody reads them as they come (origin.interactive). Ending the iteration early
        aborts the request.

        Raises InvalidRequest before anything is queued; StepFailed, Stuck or EngineDead when the
        engine could not finish it.
        """
        stream = _Stream(asyncio.get_running_loop(), origin.interactive)
        resolve = partial(self.engine.resolve, prompt_token_ids, params, origin.salt)
        resolved = await self._aside(resolve) if slow_to_resolve(params) else resolve()
        self._call(lambda: self._add(stream, resolved, origin))
        finished = False
        try:
            while not finished:
                item = await stream.get()
                if isinstance(item, Exception):
                    finished = True
                    raise item
                finished = item.finished
                if item.error is not None:
                    raise item.error
                yield item
        finally:
            if not finished:
                with suppress(EngineDead):
                    self._call(lambda: self._abort(stream))

    async def _aside(self, function: Callable[[], T]) -> T:
        """Run what may take seconds beside event loop and engine. Raises EngineDead once that has ended."""
        try:
            future = self._resolving.submit(function)
        except RuntimeError:  # shut down
            raise EngineDead(str(self._dead)) from self._dead
        return await asyncio.wrap_future(future)

    # -- on the engine thread ------------------------------------------------------------------

    def _call(self, function: Callable[[], None]) -> None:
        """Have the engine thread run `function` before its next step. Raises EngineDead."""
        with self._lock:
            if self._dead is not None:
                raise EngineDead(str(self._dead)) from self._dead
            self._inbox.put(function)

    def _add(self, stream: _Stream, resolved: Resolved, origin: Origin) -> None:
        if stream.closed:
            return
        try:
            stream.request_id = self.engine.submit(
                resolved,
                arrived=stream.arrived,
                priority=origin.priority,
                tenant=origin.tenant,
                interactive=origin.interactive,
            )
        except Exception as error:
            stream.put(error)
        else:
            self._streams[stream.request_id] = stream

    def _abort(self, stream: _Stream) -> None:
        stream.closed = True
        if stream.request_id is not None:
            self._streams.pop(stream.request_id, None)
            self.engine.abort(stream.request_id)

    def _main(self) -> None:
        error: Exception = EngineDead("the engine was shut down")
        try:
            while self._take_calls():
                self._step_began = time.monotonic()
                deltas = self.engine.step()
                self._step_began = None
                self._deliver(deltas)
        except Exception as unexpected:
            log.exception("the engine's thread ended")
            error = EngineDead(f"the engine ended: {type(unexpected).__name__}: {unexpected}")
            error.__cause__ = unexpected
        finally:
            self._end(error)

    def _take_calls(self) -> bool:
        """Run what is in the inbox, waiting for something if the engine is idle; False to end."""
        while True:
            try:
                call = self._inbox.get(block=not self.engine.has_work)
            except queue.Empty:
                return True
            if call is None:
                return False
            call()

    def _deliver(self, deltas: list[RequestDelta]) -> None:
        """Wake each loop once for all that is new to it: waking takes a system call."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, RequestDelta]]] = {}
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream is None:
                continue
            if delta.finished:
                del self._streams[delta.request_id]
            if due := stream.due(delta):
                by_loop.setdefault(stream.loop, []).extend((stream, item) for item in due)
        for loop, items in by_loop.items():
            with suppress(RuntimeError):  # it has gone, and has nobody left to tell
                loop.call_soon_threadsafe(_put_all, items)

    def _end(self, error: Exception) -> None:
        """Tell every open stream, and those whose call came too late, and give their blocks back."""
        with self._lock:
            self._dead = error
        self._resolving.shutdown(wait=False)
        with suppress(queue.Empty):
            while True:
                call = self._inbox.get_nowait()
                if call is not None:
                    call()
        for request_id, stream in self._streams.items():
            stream.put(error)
            with suppress(Exception):
                self.engine.abort(request_id)
        self._streams.clear()
        try:
            self.engine.close()
        except Exception:
            log.exception("what is cached could not be kept")
