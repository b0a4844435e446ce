"""Executes a plan: applies its copies, lays out its tensors, runs the model. Decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.attention import AttentionBackend, AttentionBatch, check_batch
from octavo.attention.pages import Ahead
from octavo.kv import Actions
from octavo.models import LoadedModel
from octavo.sched import Plan


class Entry(Protocol):
    """Compute `tokens` from position `start` on, into `slots`, for the sequence of table row `row`."""

    @property
    def row(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def tokens(self) -> list[int]: ...
    @property
    def slots(self) -> npt.NDArray[np.int64]: ...


class Batch(Protocol):
    """What forward() takes of a Plan: the actions that come first, and what to compute."""

    @property
    def actions(self) -> Actions: ...
    @property
    def entries(self) -> Sequence[Entry]: ...


class Runner:
    """A model with its KV cache: one LayerCache `[num_blocks, block_size, Hkv, D]` per layer.

    kv_dtype: of the cache, whatever the weights have; an int8 cache gets its scales. checked: validate
    every block id, length and slot of a step before the kernels see them.
    """

    def __init__(
        self,
        model: LoadedModel,
        backend: AttentionBackend,
        num_blocks: int,
        block_size: int,
        *,
        kv_dtype: torch.dtype,
        checked: bool = False,
    ) -> None:
        config = model.config
        self._decoder = model.decoder
        self._backend = backend
        self._checked = checked
        self.caches = [
            backend.allocate(num_blocks, block_size, config.num_kv_heads, config.head_dim, kv_dtype)
            for _ in range(config.num_layers)
        ]
        self._ahead: Ahead | None = None

    def keep_ahead(self) -> None:
        """From now on have the memory of blocks there before steps take them, so that none waits for it."""
        if self._ahead is None:
            self._ahead = Ahead([tensor for cache in self.caches for tensor in cache.stretches()])
            self._ahead.reached(0)

    def close(self) -> None:
        """End what runs beside the steps."""
        if self._ahead is not None:
            self._ahead.stop()

    def forward(self, plan: Batch, tables: np.ndarray) -> Tensor:
        """Run the plan, whose transfers have been carried out.

        Returns hidden `[T, E]`, a row per token of the entries in their order; logits() makes logits of
        the rows that are wanted. tables: the pool's table array. Raises whatever the model or the kernels
        raise; the plan's sequences are then undefined and must be given up.
        """
        if plan.actions.copies:
            for cache in self.caches:
                self._backend.copy_blocks(cache, plan.actions.copies)
        # Lists, not arrays: after weights have gone through the caches each call of numpy takes microseconds.
        token_ids: list[int] = []
        positions: list[int] = []
        query_start, kv_len = [0], []
        for entry in plan.entries:
            token_ids += entry.tokens
            positions += range(entry.start, entry.start + len(entry.tokens))
            query_start.append(len(token_ids))
            kv_len.append(entry.start + len(entry.tokens))
        cache = self.caches[0]
        columns = -(-max(kv_len) // cache.block_size)
        held = tables[[entry.row for entry in plan.entries], :columns]
        batch = AttentionBatch(
            tables=torch.from_numpy(held),
            query_start=torch.tensor(query_start, dtype=torch.int32),
            kv_len=torch.tensor(kv_len, dtype=torch.int32),
            slots=torch.from_numpy(np.concatenate([entry.slots for entry in plan.entries])),
        )
        if self._checked:
            check_batch(batch, cache.num_blocks, cache.block_size, len(token_ids))
        if self._ahead is not None:
            self._ahead.reached(int(held.max()))
        return self._decoder.forward(
            torch.tensor(token_ids), torch.tensor(positions), self.caches, batch, self._backend
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[S, V]` float32 of rows `[S, E]` of what forward() returned."""
        return self._decoder.logits(hidden)


def sampled_rows(plan: Plan, hidden: Tensor) -> Tensor:
    """The rows of `hidden` whose logits give next tokens, `[S, E]`: an entry's last and those of its guesses.
    Where these are all of them, as in a step of decodes, `hidden` itself."""
    rows: list[int] = []
    end = 0
    for entry in plan.entries:
        end += len(entry.tokens)
        if entry.num_samples:
            rows += range(end - 1 - entry.num_draft, end)
    if len(rows) == len(hidden):
        return hidden
    return hidden.index_select(0, torch.tensor(rows, dtype=torch.int64))
