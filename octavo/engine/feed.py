"""Carries a Recorder's frames to any number of watchers, from one thread of its own.

    engine thread <--ask (between steps)-- feed thread --bytes--> watcher, watcher, file ...

At most FRAMES_PER_SECOND frames a second, each with all that changed since the one before. The thread and
the recorder run only while somebody watches. A watcher gets a snapshot first, then every frame after it.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from octavo.engine.errors import EngineDead
from octavo.engine.recorder import Frame, Recorder
from octavo.engine.thread import EngineThread

log = logging.getLogger(__name__)

FRAMES_PER_SECOND = 10
Watcher = Callable[[bytes | None], None]
"""Called on the feed's thread with one JSON object, or None when nothing more will come. Must not block."""


class Feed:
    """The frames of one engine thread."""

    def __init__(self, thread: EngineThread, frames_per_second: float = FRAMES_PER_SECOND) -> None:
        self._engine = thread
        self._interval = 1 / frames_per_second
        self.recorder = Recorder(thread.engine)
        self._lock = threading.Lock()
        self._watchers: list[Watcher] = []
        self._new: list[Watcher] = []  # these get a snapshot first
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()

    def subscribe(self, watcher: Watcher) -> None:
        """Send `watcher` a snapshot and the frames after it until unsubscribe()."""
        with self._lock:
            self._new.append(watcher)
            self._wake.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._main, name="octavo-feed", daemon=True)
                self._thread.start()

    def unsubscribe(self, watcher: Watcher) -> None:
        """Send it nothing more. One that is not subscribed is ignored."""
        with self._lock:
            for watchers in (self._watchers, self._new):
                if watcher in watchers:
                    watchers.remove(watcher)
            self._wake.set()

    @property
    def watched(self) -> bool:
        """Whether anybody watches."""
        return bool(self._watchers or self._new)

    # -- on the feed's thread ------------------------------------------------------------------

    def _main(self) -> None:
        due = time.monotonic()
        try:
            while True:
                with self._lock:
                    if not self.watched:
                        self._thread = None
                        break
                    new, self._new = self._new, []
                    self._wake.clear()
                frame, snapshot = self._engine.ask(partial(self._look, bool(new))).result()
                self._send(frame, snapshot, new)
                due = max(due + self._interval, time.monotonic())
                while (left := due - time.monotonic()) > 0 and not self._new and self.watched:
                    self._wake.wait(left)
                    self._wake.clear()
            self._engine.ask(self._rest).result()
        except EngineDead:
            self._end()
        except Exception:
            log.exception("the memory map's feed ended")
            self._end()

    def _look(self, with_snapshot: bool) -> tuple[Frame | None, Frame | None]:
        """On the engine's thread."""
        if not self.recorder.attached:
            self.recorder.attach()
        frame = self.recorder.take()
        return frame, self.recorder.snapshot() if with_snapshot else None

    def _rest(self) -> None:
        """On the engine's thread: nobody watches, unless someone came in the meantime."""
        if not self.watched:
            self.recorder.detach()

    def _send(self, frame: Frame | None, snapshot: Frame | None, new: list[Watcher]) -> None:
        with self._lock:
            old = list(self._watchers)
            self._watchers += new
        if frame is not None and old:
            self._deliver(old, {"kind": "frame", **frame})
        if snapshot is not None:
            self._deliver(new, {"kind": "snapshot", **snapshot})

    def _deliver(self, watchers: list[Watcher], value: dict[str, Any]) -> None:
        data = json.dumps(value, separators=(",", ":")).encode()
        for watcher in watchers:
            watcher(data)

    def _end(self) -> None:
        with self._lock:
            watchers, self._watchers, self._new, self._thread = [*self._watchers, *self._new], [], [], None
        for watcher in watchers:
            watcher(None)
