"""Who runs next, and with how many tokens, when memory is short.

    submit -> waiting (oldest first) --admit--> running (oldest first) --finish--> gone
                    ^                              |
                    +--------- preempt ------------+   blocks given back; KV stays findable in the tree

Each step: every running branch computes its next token (or prompt chunk) as far as the token budget
goes, decodes before chunks so that a long prompt does not stall running streams. Memory goes to the
oldest: when a branch finds no room, the youngest running one is preempted, until it fits or is itself
the youngest, and then it waits a step. Only after a step without preemption are waiting branches
admitted, oldest first, each with room for all its known tokens and a watermark to spare, so that an
admitted prompt never stalls half-way.

So the oldest branch can always finish alone: submit() refused what an empty pool cannot hold, and
nothing older can take its room.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from octavo.kv import NoRoom, Pool, Sequence
from octavo.sched.config import SchedulerConfig
from octavo.sched.errors import NeverFits
from octavo.sched.plan import Plan, PlanEntry
from octavo.sched.request import Branch, Request, State


def _age(branch: Branch) -> tuple[int, int]:
    return branch.age


def _width(branch: Branch) -> int:
    """Branches that this one stands for: all n of its request until they are forked."""
    return branch.request.n if branch.request.unforked else 1


@dataclass(slots=True)
class _Draft:
    """A plan in the making."""

    budget: int
    chosen: dict[Branch, int] = field(default_factory=dict)
    preempted: list[Branch] = field(default_factory=list)
    stuck: list[Branch] = field(default_factory=list)

    def choose(self, branch: Branch, count: int) -> None:
        self.chosen[branch] = count
        self.budget -= count

    def drop(self, branch: Branch) -> None:
        self.budget += self.chosen.pop(branch, 0)


@dataclass(slots=True)
class SchedulerStats:
    """Counts since the start. computed includes recomputed; both in tokens."""

    admitted: int = 0
    preemptions: int = 0
    computed: int = 0
    recomputed: int = 0
    peak_running: int = 0
    peak_held_blocks: int = 0


class Scheduler:
    """Continuous batching over a Pool, first come first served. Decides; never touches a tensor."""

    def __init__(self, pool: Pool, config: SchedulerConfig) -> None:
        self.pool = pool
        self.config = config
        self.waiting: list[Branch] = []  # oldest first
        self.running: list[Branch] = []  # oldest first
        self.stats = SchedulerStats()
        self._arrivals = 0

    @property
    def has_work(self) -> bool:
        """Whether any branch waits or runs."""
        return bool(self.waiting or self.running)

    def check_fits(self, num_prompt: int, max_tokens: int, n: int = 1) -> None:
        """Raise NeverFits if such a request could not run even alone in an empty pool."""
        config, total = self.config, num_prompt + max_tokens
        if total > config.max_model_len:
            raise NeverFits(
                f"the prompt's {num_prompt} tokens and max_tokens {max_tokens} make {total}, but the context "
                f"holds {config.max_model_len}: shorten the prompt, lower max_tokens or raise max_model_len",
                param="max_tokens" if num_prompt < config.max_model_len else "prompt",
            )
        fit = self.pool.can_ever_fit(max(num_prompt, total - 1))  # the last sampled token needs no slot
        if not fit:
            raise NeverFits(
                f"{num_prompt} prompt tokens and {max_tokens} to sample need {fit.need} blocks of "
                f"{self.pool.block_size}, but the pool has {fit.have}: lower max_tokens or raise kv_memory",
                param="max_tokens",
            )
        if n > config.max_running:
            raise NeverFits(
                f"n = {n} sequences, but at most {config.max_running} run at once: "
                "lower n or raise max_num_seqs and max_batched_tokens",
                param="n",
            )

    def submit(self, request: Request) -> None:
        """Queue a request. Raises NeverFits, with need, have and option, for what can never run."""
        self.check_fits(len(request.prompt), request.max_tokens, request.n)
        request.arrival = self._arrivals
        self._arrivals += 1
        first = Branch(request, 0, list(request.prompt))
        request.branches.append(first)
        request.made = 1
        self.waiting.append(first)

    def plan(self) -> Plan:
        """Decide the next step and take its slots. Entries are empty only when nothing can run."""
        draft = _Draft(self.config.max_batched_tokens)
        self._plan_running(draft)
        if not draft.preempted:
            self._admit(draft)
        if self.waiting and not self.running:  # an empty pool cannot hold what submit() let through
            self._give_up(next(branch for branch in self.waiting if not branch.idle), draft)
        entries = tuple(self._entry(branch, count) for branch, count in draft.chosen.items())
        self.stats.peak_running = max(self.stats.peak_running, len(self.running))
        self.stats.peak_held_blocks = max(self.stats.peak_held_blocks, self.pool.stats().held)
        return Plan(entries, self.pool.drain(), tuple(draft.preempted), tuple(draft.stuck))

    def complete(self, plan: Plan, sampled: Seq[Seq[int]]) -> list[Branch]:
        """The plan's forward pass is done: publish its KV and append the sampled tokens.

        sampled: per entry, `num_samples` token ids; with a draft, those accepted and the one after; none
        for a beam, which is then idle until resumed. Returns the branches that got tokens, those just
        forked included, in the order of `sampled`.
        """
        grown: list[Branch] = []
        for entry, tokens in zip(plan.entries, sampled, strict=True):
            branch = entry.branch
            assert branch.kv is not None
            self.stats.computed += len(entry.tokens)
            if entry.num_draft:
                branch.kv.commit(entry.tokens[: len(tokens)])
                branch.kv.truncate(branch.kv.committed)
                branch.tokens += tokens
                grown.append(branch)
                continue
            # More than one token are those that open() was given, so their number is enough.
            branch.kv.commit(len(entry.tokens) if len(entry.tokens) > 1 else entry.tokens)
            branch.request.scored = max(branch.request.scored, entry.start + len(entry.tokens))
            branch.idle = branch.request.beams and entry.num_samples > 0
            if tokens:
                grown += [branch, *(self.fork(branch) for _ in tokens[1:])]
                for grower, token in zip(grown[-len(tokens) :], tokens, strict=True):
                    grower.tokens.append(token)
        return grown

    def fork(self, branch: Branch) -> Branch:
        """Another branch of the same request, with the same tokens so far; KV is shared, none is computed.

        Where the branch's KV is not on the device, the other one waits and finds what is left of it."""
        request = branch.request
        child = Branch(request, request.made, list(branch.tokens))
        request.made += 1
        request.branches.append(child)
        if branch.kv is not None and branch.kv.on_device:
            child.kv, child.state = branch.kv.fork(), State.RUNNING
            insort(self.running, child, key=_age)
        else:
            insort(self.waiting, child, key=_age)
        return child

    def resume(self, branch: Branch, token: int) -> None:
        """An idle beam goes on with `token`."""
        branch.tokens.append(token)
        branch.idle = False

    def drop(self, branch: Branch) -> None:
        """A beam that lost: as finish(), and the request forgets it."""
        self.finish(branch)
        branch.request.branches.remove(branch)

    def finish(self, branch: Branch) -> None:
        """A branch is done, or given up: its blocks go back; what it computed stays findable."""
        if branch.state is State.RUNNING:
            self.running.remove(branch)
        elif branch.state is State.WAITING:
            self.waiting.remove(branch)
        branch.state = State.FINISHED
        if branch.kv is not None:
            branch.kv.close()
            branch.kv = None

    def abort(self, request: Request) -> None:
        """Give up every branch of a request, wherever it is. Not between plan() and complete()."""
        for branch in request.branches:
            if branch.state is not State.FINISHED:
                self.finish(branch)

    def retract(self, plan: Plan, lost: Seq[Sequence]) -> Plan:
        """The KV of some sequences turned out to be gone before the plan ran: their branches wait and
        compute it again; returns the plan without them."""
        for branch in [branch for branch in self.running if branch.kv in lost]:
            self._preempt(branch)
        kept = tuple(entry for entry in plan.entries if entry.branch.kv is not None)
        return plan._replace(entries=kept)

    def fail(self, plan: Plan) -> list[Request]:
        """The plan's forward pass raised: give up the requests in it, nothing of it published."""
        requests = list(dict.fromkeys(entry.branch.request for entry in plan.entries))
        for request in requests:
            self.abort(request)
        return requests

    # -- planning ------------------------------------------------------------------------------

    def _plan_running(self, draft: _Draft) -> None:
        """Every running branch's next tokens, decodes first, as far as budget and memory go."""
        decodes = [branch for branch in self.running if branch.remaining == 1]
        chunks = [branch for branch in self.running if branch.remaining > 1]
        for branch in decodes + chunks:
            if branch.state is not State.RUNNING or draft.budget == 0:
                continue
            count = min(branch.remaining, draft.budget)
            if self._make_room(branch, count, draft):
                draft.choose(branch, count)
            elif len(self.running) == 1:
                self._give_up(branch, draft)
        for branch in decodes:
            if branch in draft.chosen:
                self._add_draft(branch, draft)

    def _add_draft(self, branch: Branch, draft: _Draft) -> None:
        """Let a decode check its guesses too, as far as budget and free memory go: nobody pays for them."""
        assert branch.kv is not None
        count = min(len(branch.draft), draft.budget)
        if count and not isinstance(branch.kv.reserve(1 + count), NoRoom):
            draft.drop(branch)
            draft.choose(branch, 1 + count)

    def _make_room(self, branch: Branch, count: int, draft: _Draft) -> bool:
        """Reserve `count` tokens, preempting younger branches one by one; False if that is not enough."""
        assert branch.kv is not None
        while isinstance(branch.kv.reserve(count), NoRoom):
            youngest = self._victim(branch)
            if youngest is branch:
                return False
            draft.drop(youngest)
            self._preempt(youngest)
            draft.preempted.append(youngest)
        return True

    def _victim(self, branch: Branch) -> Branch:
        """The youngest running branch; before it, idle ones, which lose nothing but what may be cached."""
        idle = (other for other in reversed(self.running) if other.idle and other is not branch)
        return next(idle, self.running[-1])

    def _give_up(self, branch: Branch, draft: _Draft) -> None:
        """End a branch that finds no room though nothing else runs, rather than retry for ever."""
        self.finish(branch)
        draft.stuck.append(branch)

    def _preempt(self, branch: Branch) -> None:
        """Take a running branch's blocks; it waits, in the order of age, and recomputes what is lost."""
        assert branch.kv is not None
        branch.num_lost = branch.kv.committed
        branch.num_preemptions += 1
        self.stats.preemptions += 1
        branch.kv.close()
        branch.kv = None
        branch.state = State.WAITING
        self.running.remove(branch)
        insort(self.waiting, branch, key=_age)

    def _admit(self, draft: _Draft) -> None:
        """Start waiting branches, oldest first, until one does not fit. Idle ones need not run; where they
        are all that is in the way, they give way."""
        for branch in [branch for branch in self.waiting if not branch.idle]:
            while draft.budget == 0 or not self._has_place(branch) or not self._start(branch):
                idle = [other for other in self.running if other.idle]
                if draft.chosen or not idle:
                    return
                self._preempt(idle[-1])
                draft.preempted.append(idle[-1])
            draft.choose(branch, min(branch.remaining, draft.budget))

    def _has_place(self, branch: Branch) -> bool:
        """Whether one more, with all the branches it stands for, may run."""
        return sum(_width(other) for other in [*self.running, branch]) <= self.config.max_running

    def _start(self, branch: Branch) -> bool:
        """Open and reserve all that is known of a waiting branch, if growth room is left for the others."""
        pool = self.pool
        kv, request = pool.open(branch.tokens, branch.request.scope), branch.request
        if request.score_prompt and request.scored < min(kv.length, len(request.prompt)):
            kv.truncate(request.scored)
        spare = 0
        if self.running:
            # Every running branch may want a block more before the next chance to decide otherwise.
            spare = math.ceil(self.config.watermark * pool.num_blocks) + len(self.running)
        need = pool.blocks_for(len(branch.tokens)) - len(kv.table) + (kv.length % pool.block_size > 0)
        if (spare and need + spare > pool.available) or isinstance(
            kv.reserve(len(branch.tokens) - kv.length), NoRoom
        ):
            kv.close()
            return False
        branch.kv = kv
        branch.state = State.RUNNING
        self.waiting.remove(branch)
        insort(self.running, branch, key=_age)
        if branch.request.num_cached is None:
            branch.request.num_cached = kv.num_cached
        self.stats.recomputed += max(0, branch.num_lost - kv.num_cached)
        branch.num_lost = 0
        self.stats.admitted += 1
        return True

    def _entry(self, branch: Branch, count: int) -> PlanEntry:
        assert branch.kv is not None
        start = branch.kv.length
        slots = branch.kv.extend(count)
        known = len(branch.tokens)
        guesses = max(0, start + count - known)
        tokens = branch.tokens[start : start + count] + branch.draft[:guesses]
        samples = 0
        if start + count >= known:
            samples = 1 if branch.request.beams else _width(branch)
        return PlanEntry(branch, start, tokens, slots, samples, guesses)
