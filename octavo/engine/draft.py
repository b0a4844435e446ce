"""Guesses by a smaller model of the same vocabulary, with a paged KV cache of its own.

    tokens of a branch    [ known ........................ ][ guesses ... ]
    KV of the draft       | committed         | catch up   | g1 g2 ..     |   the last guess needs none
                                              pass 1        passes 2, 3 ..    all branches in each pass

After the step has checked the guesses, the KV of those that came true is committed and the rest truncated;
that happens when the branch guesses next, by comparing what was written with what the branch became. So
nothing here depends on what the step did: guesses dropped for want of room, preemption, abort need no word.
A branch that does not run gives its blocks back, findable by its tokens in the draft's own prefix tree.

A guess is drawn as the model's token will be, with the same random number, bans and penalties, so a draft
that agrees with the model guesses right at any temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.attention import AttentionBackend
from octavo.attention.interface import LayerCache
from octavo.engine.config import STORED, Budget, EngineConfig
from octavo.engine.errors import ConfigError
from octavo.engine.guess import Worth
from octavo.engine.live import BranchState, Live
from octavo.engine.propose import Wanted
from octavo.engine.runner import Runner
from octavo.engine.sampler import NO_TOKEN, Draw, sample
from octavo.kv import Actions, NoRoom, Pool
from octavo.kv import Sequence as KVSequence
from octavo.models import LoadedModel
from octavo.sched import Branch, Request
from octavo.sched.request import State

CATCH_UP = 512
"""Tokens that the draft computes in one step besides guesses: a long prompt takes it several, in which the
branch does not guess, so that no step waits for long."""


class Work(NamedTuple):
    """Compute `tokens` from position `start` on, into `slots`, for the sequence of table row `row`."""

    row: int
    start: int
    tokens: list[int]
    slots: npt.NDArray[np.int64]


class Pass(NamedTuple):
    """One forward pass of the draft: first `actions`, then the entries."""

    entries: tuple[Work, ...]
    actions: Actions


@dataclass(eq=False, slots=True)
class _Own:
    """What the draft keeps of a branch. written: the guesses whose KV lies behind what is committed. count:
    guesses that it is to make once it has caught up, 0 if that is to be decided."""

    worth: Worth
    kv: KVSequence | None = None
    written: list[int] = field(default_factory=list)
    count: int = 0


@dataclass(eq=False, slots=True)
class _Lane:
    """A branch in the passes of a step. state: what its next guess depends on."""

    live: Live
    branch: Branch
    own: _Own
    todo: list[int]
    count: int
    state: BranchState

    @property
    def draws(self) -> bool:
        """Whether the next pass is to give another guess: it has caught up and may go on."""
        return len(self.branch.draft) < self.count

    def take(self, token: int) -> None:
        """A guess was drawn; after none, or after one that ends the text, there is no other."""
        if token == NO_TOKEN:
            self.count = 0
            return
        self.branch.draft.append(token)
        if token in self.live.stop_ids:
            self.count = 0
            return
        self.state, self.todo = self.state.after(token), [token]


class DraftModel:
    """A proposer, see propose.py. price: of one of its passes, as a part of one of the model's.

    Its pool has as many blocks as the model's, of the same number of tokens. Raises ConfigError unless the
    vocabularies are the same.
    """

    def __init__(
        self,
        draft: LoadedModel,
        model: LoadedModel,
        config: EngineConfig,
        budget: Budget,
        backend: AttentionBackend,
        kv_dtype: str,
    ) -> None:
        check_vocabulary(draft, model)
        self.model = draft
        self.pool = Pool(budget.num_blocks, budget.block_size, prefix_caching=config.prefix_caching)
        self.price = draft.weights_bytes / model.weights_bytes
        self._limit = config.speculate
        self._context = draft.config.position_limit or draft.config.max_position_embeddings
        self._budget = min(CATCH_UP, config.max_batched_tokens)
        self._bytes = budget.num_blocks * budget.draft_bytes_per_block
        self._runner = Runner(
            draft, backend, budget.num_blocks, budget.block_size,
            kv_dtype=STORED[kv_dtype], checked=config.checked,
        )  # fmt: skip
        self._owns: dict[Branch, _Own] = {}

    @property
    def caches(self) -> list[LayerCache]:
        """Its KV cache, a part per layer."""
        return self._runner.caches

    def propose(self, wanted: Sequence[Wanted], company: int) -> None:
        """See Proposer. Cost: as many passes of the draft as the longest draft has tokens."""
        left, lanes = self._budget, []
        # The others of such a request find in the cache what the first computes.
        beginning: set[Request] = set()
        for live, branch, room in wanted:
            own = self._owns.setdefault(branch, _Own(Worth(self._limit)))
            if own.kv is None and branch.request in beginning and self.pool.prefix_caching:
                continue
            lane = self._lane(live, branch, own, room, company, left)
            if lane is not None:
                left -= len(lane.todo)
                lanes.append(lane)
                if len(lane.todo) > self.pool.block_size:
                    beginning.add(branch.request)
        while lanes:
            self._pass(lanes)
            lanes = [lane for lane in lanes if lane.draws]

    def checked(self, live: Live, branch: Branch, guessed: int, accepted: int) -> None:
        """See Proposer."""
        self._owns[branch].worth.check(guessed, accepted)

    def settle(self) -> None:
        """See Proposer. O(branches)."""
        for branch, own in list(self._owns.items()):
            if own.kv is not None and branch.state is not State.RUNNING:
                self._close(own, branch)
            if branch.state is State.FINISHED:
                del self._owns[branch]

    def drop(self) -> None:
        """A pass failed: what it wrote is not known, so nothing of it may be found."""
        for own in self._owns.values():
            if own.kv is not None:
                own.kv.revoke()
                own.kv.close()
        self._owns.clear()
        self.pool.drain()

    def note(self) -> str:
        """See Proposer."""
        return (
            f"up to {self._limit} tokens guessed by {self.model.name} (--draft-model): "
            f"{self.model.weights_bytes:,} bytes of weights, {self._bytes:,} of KV, "
            f"{self.pool.num_blocks:,} blocks"
        )

    # -- inside --------------------------------------------------------------------------------

    def _lane(
        self, live: Live, branch: Branch, own: _Own, room: int, company: int, left: int
    ) -> _Lane | None:
        """The part of a branch in this step; None where it has none."""
        room = min(room, self._context - len(branch.tokens))
        if room <= 0 or left <= 0:
            return None
        if not own.count:
            own.count = own.worth.count(company, self.price)
        if not own.count:
            return None
        kv = self._caught_up(own, branch)
        todo = branch.tokens[kv.length :][:left]
        count = min(own.count, room) if kv.length + len(todo) == len(branch.tokens) else 0
        if isinstance(kv.reserve(len(todo) + max(0, count - 1)), NoRoom):
            return None
        if count:
            own.count = 0
        return _Lane(live, branch, own, todo, count, live.state(branch))

    def _caught_up(self, own: _Own, branch: Branch) -> KVSequence:
        """The draft's KV of a branch, with nothing in it but what the branch became, and at least its last
        token to compute."""
        tokens = branch.tokens
        if own.kv is None:
            own.kv = self.pool.open(tokens, branch.request.scope)
            return own.kv
        kv, start = own.kv, own.kv.committed
        true = next((i for i, (a, b) in enumerate(zip(own.written, tokens[start:])) if a != b), None)
        end = start + (min(len(own.written), len(tokens) - start) if true is None else true)
        if end > start:
            kv.commit(tokens[start:end])
        kv.truncate(min(end, len(tokens) - 1))
        own.written = []
        return kv

    def _pass(self, lanes: Sequence[_Lane]) -> None:
        """One forward pass over what each lane has to do, and a guess for those that draw."""
        works = []
        for lane in lanes:
            kv = lane.own.kv
            assert kv is not None
            start = kv.length
            works.append(Work(kv.row, start, lane.todo, kv.extend(len(lane.todo))))
        hidden = self._runner.forward(Pass(tuple(works), self.pool.drain()), self.pool.tables)
        ends = np.cumsum([len(work.tokens) for work in works]) - 1
        for lane in lanes:
            kv = lane.own.kv
            assert kv is not None
            if lane.branch.draft:  # a guess: it is known later whether it is committed
                lane.own.written += lane.todo
            else:
                kv.commit(lane.todo)
        drawing = [i for i, lane in enumerate(lanes) if lane.draws]
        if not drawing:
            return
        logits = self._runner.logits(hidden[ends[drawing]])
        draws = [self._draw(row, lanes[i]) for row, i in enumerate(drawing)]
        for i, token in zip(drawing, sample(logits, draws), strict=True):
            lanes[i].take(token)

    def _draw(self, row: int, lane: _Lane) -> Draw:
        """As the model's token in that place will be drawn, but for a form that it must have."""
        live, branch = lane.live, lane.branch
        position = branch.num_output + len(branch.draft)
        banned = live.banned(lane.state, position)
        return Draw(row, live.params, live.seed, branch.index, position, banned, lane.state.counts)

    def _close(self, own: _Own, branch: Branch) -> None:
        """Give the blocks back; what came true stays findable."""
        self._caught_up(own, branch).close()
        own.kv = None


def check_vocabulary(draft: LoadedModel, model: LoadedModel) -> None:
    """Raise ConfigError, with both numbers, unless each token id means the same to both models."""
    ours, theirs = model.config.vocab_size, draft.config.vocab_size
    if ours != theirs:
        raise ConfigError(
            f"the draft model {draft.name} has {theirs:,} tokens and {model.name} has {ours:,}: a draft must "
            "have the same vocabulary; choose another draft_model",
            param="draft_model",
        )
    for token in range(ours):
        one, other = model.tokenizer.token_bytes(token), draft.tokenizer.token_bytes(token)
        if one != other:
            raise ConfigError(
                f"token {token} is {other!r:.40} to the draft model {draft.name}, but {one!r:.40} to "
                f"{model.name} ({theirs:,} and {ours:,} tokens): a draft must have the same vocabulary; "
                "choose another draft_model",
                param="draft_model",
            )
