"""What the memory map shows, as deltas: which blocks, sequences and counts changed since the last look.

    engine thread   planned / stepped --> events, counts          a few microseconds a step
                    pool's Watch      --> ids of touched blocks
    whoever asks    take()            --> Frame: what changed since the last Frame, or None
                    snapshot()        --> everything, to start from

A frame is plain data for JSON (docs/memory-map.md has the format). State is read only for what was
touched, so a look costs O(changed blocks + sequences). All of it happens on the engine's thread; detached,
it costs nothing.
"""

from __future__ import annotations

import base64
import time
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.engine.observe import Observer
from octavo.engine.outputs import RequestDelta
from octavo.kv import Move, Tier
from octavo.kv.watch import NOT_PUBLISHED, Watch
from octavo.sched import Branch, Plan

if TYPE_CHECKING:
    from octavo.engine.engine import Engine

Frame = dict[str, Any]
MAX_WAITING = 256
"""Waiting sequences that are listed; `counts.waiting` has them all."""
MAX_EVENTS = 256
"""Events of a kind in one frame; `counts` has their true number."""


class Recorder(Observer):
    """Watches one engine between attach() and detach(). Every method is for the engine's thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._watch: Watch | None = None
        self._events: dict[str, list[Any]] = {}
        self._shown: dict[str, list[Any]] = {}  # by sequence id: what the last frame said of it
        self._tables: dict[str, np.ndarray] = {}
        self._counts: dict[str, int] = {}
        self._steps = self._generated = self._finished = 0
        self._blocked: Counter[str] = Counter()  # as it was after the last step
        self._why = self._told = ""  # what the first in the queue waits for, now and in the last frame

    @property
    def attached(self) -> bool:
        """Whether it watches."""
        return self._watch is not None

    def attach(self) -> None:
        """Begin to watch. O(num_blocks): the state that deltas start from is read once."""
        engine = self._engine
        self._watch = engine.pool.watch()
        count = engine.pool.num_blocks
        self._refs = np.zeros(count, np.uint16)
        self._fill = np.zeros(count, np.uint16)
        self._parent = np.full(count, NOT_PUBLISHED, np.int32)
        for block in range(count):
            self._look(block)
        self._blocked = engine.scheduler.stats.blocked.copy()
        engine.observers.append(self)
        self.take()

    def detach(self) -> None:
        """Stop; forget everything."""
        if self._watch is not None:
            self._engine.observers.remove(self)
            self._engine.pool.unwatch()
            self._watch = None
            self._events, self._shown, self._tables, self._counts = {}, {}, {}, {}
            self._why = self._told = ""

    # -- while the engine works ----------------------------------------------------------------

    def planned(self, plan: Plan) -> None:
        self._steps += bool(plan.entries)
        blocked = self._engine.scheduler.stats.blocked
        self._why = next((why for why, count in blocked.items() if count != self._blocked[why]), "")
        self._blocked = blocked.copy()
        actions = plan.actions
        for copy in actions.copies[:MAX_EVENTS]:
            self._event("copy", [copy.src, copy.dst, copy.num_slots])
        for transfer in actions.transfers[:MAX_EVENTS]:
            if isinstance(transfer, Move):
                out = transfer.dst.tier is not Tier.DEVICE
                self._event("out" if out else "in", transfer.src.slot if out else transfer.dst.slot)
        for branch in plan.preempted[:MAX_EVENTS]:
            self._event("preempt", self._name(branch))

    def stepped(self, deltas: Sequence[RequestDelta]) -> None:
        for delta in deltas:
            self._generated += sum(len(sequence.token_ids) for sequence in delta.deltas)
            self._finished += delta.finished

    def _event(self, kind: str, value: Any) -> None:
        events = self._events.setdefault(kind, [])
        if len(events) < MAX_EVENTS:
            events.append(value)

    # -- when somebody asks --------------------------------------------------------------------

    def take(self) -> Frame | None:
        """What changed since the last call, None if nothing did."""
        assert self._watch is not None
        changes = self._watch.take()
        count, fresh = len(self._refs), changes.fresh
        changed = {b for b in changes.touched if b < count and self._look(b, b in fresh)}
        sequences, gone = self._sequences(changed)
        frame: Frame = {}
        if changed:
            ids = sorted(changed)
            columns = (ids, self._refs[ids], self._fill[ids], self._parent[ids])
            frame["blocks"] = np.stack(columns, 1).ravel().tolist()
        if sequences:
            frame["seqs"] = sequences
        if gone:
            frame["gone"] = gone
        if changes.evicted:
            self._events["evict"] = changes.evicted[:MAX_EVENTS]
        if self._events:
            frame["events"], self._events = self._events, {}
        if self._why != self._told:
            frame["why"] = self._told = self._why
        counts = self._read_counts()
        if counts != self._counts or frame:
            self._counts = counts
            frame["counts"] = counts
            frame["t"] = round(time.time(), 3)
        return frame or None

    def snapshot(self) -> Frame:
        """All that frames change, as it is after the last take(), and what stays: sizes and the model."""
        engine = self._engine
        sequences = []
        for name, row in self._shown.items():
            table = self._tables.get(name)
            sequences.append([*row, [0, *table.tolist()]] if table is not None else row)
        return {
            "t": round(time.time(), 3),
            "model": engine.model_name,
            "block_size": engine.pool.block_size,
            "num_blocks": engine.pool.num_blocks,
            "bytes_per_block": engine.budget.bytes_per_block,
            "max_num_seqs": engine.config.max_num_seqs,
            "refs": _packed(self._refs),
            "fill": _packed(self._fill),
            "parent": _packed(self._parent),
            "seqs": sequences,
            "why": self._told,
            "counts": self._counts,
        }

    def contents(self, block: int, *, text: bool) -> dict[str, Any]:
        """The tokens that a block holds now: their number, and with `text` their ids and what they say."""
        engine = self._engine
        ids: list[int] = []
        if self._watch is not None and 0 <= block < engine.pool.num_blocks:
            ids = np.frombuffer(self._watch.tokens(block), np.int32).tolist()
            size = engine.pool.block_size
            for branch in engine.scheduler.running:
                if branch.kv is None:
                    continue
                for index in np.flatnonzero(branch.kv.table == block).tolist():
                    own = branch.tokens[index * size : min((index + 1) * size, branch.kv.committed)]
                    ids = own if len(own) > len(ids) else ids
        found: dict[str, Any] = {"block": block, "num_tokens": len(ids)}
        if text:
            found["tokens"] = ids
            found["text"] = engine.tokenizer.decode(ids) if ids else ""
        return found

    def _look(self, block: int, fresh: bool = False) -> bool:
        """Read one block; whether it looks otherwise than before. What a private block holds is said by the
        sequences that hold it, so its fill is kept until they speak, unless it was just allocated."""
        assert self._watch is not None
        view = self._watch.view(block)
        refs = min(view.refs, 65535)
        fill = view.fill
        if view.parent == NOT_PUBLISHED and refs and not fresh:
            fill = int(self._fill[block])
        old = int(self._refs[block]), int(self._fill[block]), int(self._parent[block])
        self._refs[block], self._fill[block], self._parent[block] = refs, fill, view.parent
        return old != (refs, fill, view.parent)

    def _sequences(self, changed: set[int]) -> tuple[list[list[Any]], list[str]]:
        """Rows of the sequences that changed, and the ids of those that ended; notes blocks they filled."""
        scheduler = self._engine.scheduler
        rows: list[list[Any]] = []
        now: dict[str, list[Any]] = {}
        for branch in [*scheduler.running, *islice(scheduler.waiting, MAX_WAITING)]:
            name = self._name(branch)
            kv = branch.kv
            state = branch.state.value[0] if kv is None or kv.on_device else "s"
            request, before = branch.request, self._shown.get(name)
            row = now[name] = [
                name,
                state,
                len(request.prompt),
                request.num_cached or 0,
                len(branch.tokens),
                kv.committed if kv is not None else 0,
                request.max_tokens,
                branch.num_preemptions,
            ]
            if row == before:
                continue
            suffix = self._table(name, branch, 0 if before is None else before[5], changed)
            rows.append(row if suffix is None else [*row, suffix])
        gone = [name for name in self._shown if name not in now]
        for name in gone:
            self._tables.pop(name, None)
        self._shown = now
        return rows, gone

    def _table(self, name: str, branch: Branch, committed: int, changed: set[int]) -> list[int] | None:
        """The part of a block table that differs from the one shown before: [from index, ids ...].

        Fills of the blocks that this sequence wrote since are updated.
        """
        before = self._tables.get(name)
        table = branch.kv.table.copy() if branch.kv is not None else np.empty(0, np.int32)
        if before is None:
            first, same = 0, not len(table)
        else:
            shared = min(len(before), len(table))
            differs = np.flatnonzero(before[:shared] != table[:shared])
            first = int(differs[0]) if len(differs) else shared
            same = first == len(before) == len(table)
        if branch.kv is not None:
            self._fills(
                table, min(first, committed // self._engine.pool.block_size), branch.kv.committed, changed
            )
        if same:
            return None
        self._tables[name] = table
        return [first, *table[first:].tolist()]

    def _fills(self, table: np.ndarray, first: int, committed: int, changed: set[int]) -> None:
        """What the blocks of a table from index `first` on hold of its sequence's tokens."""
        size = self._engine.pool.block_size
        for index in range(first, len(table)):
            block = int(table[index])
            fill = min(max(committed - index * size, 0), size)
            # Another sequence, or the tree, may know of more tokens in a block that is shared.
            shared = self._refs[block] > 1 or self._parent[block] != NOT_PUBLISHED
            fill = max(fill, int(self._fill[block])) if shared else fill
            if block >= 0 and fill != self._fill[block]:
                self._fill[block] = fill
                changed.add(block)

    def _name(self, branch: Branch) -> str:
        return f"{self._engine.request_id(branch.request)}.{branch.index}"

    def _read_counts(self) -> dict[str, int]:
        """Gauges, and counts since the start."""
        assert self._watch is not None
        engine = self._engine
        pool, scheduler = engine.pool.stats(), engine.scheduler
        counts = {
            "free": pool.free,
            "held": pool.held,
            "cached": pool.cached,
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "steps": self._steps,
            "generated": self._generated,
            "finished": self._finished,
            "computed": scheduler.stats.computed,
            "recomputed": scheduler.stats.recomputed,
            "preemptions": scheduler.stats.preemptions,
            "allocated": self._watch.allocated,
            "copies": pool.copies,
            "merges": pool.merges,
            "evictions": pool.evictions,
            "demotions": pool.demotions,
            "promotions": pool.promotions,
            "queried": pool.queried_tokens,
            "hits": pool.hit_tokens,
        }
        for name, tier in (("host", pool.host), ("disk", pool.disk)):
            if tier.slots:
                counts |= {
                    f"{name}_slots": tier.slots,
                    f"{name}_held": tier.held,
                    f"{name}_cached": tier.cached,
                }
        return counts


def _packed(array: np.ndarray) -> str:
    """Little-endian bytes in base64, as a typed array of a browser reads them."""
    return base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode("ascii")
