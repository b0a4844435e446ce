"""Who runs next, and with how many tokens, when memory is short.

    submit -> waiting --admit--> running --finish--> gone         waiting: queue.py
                 ^                  |                             admit: admission.py
                 +---- preempt -----+                             preempt: preemption.py, reclaim.py

Each step: every running branch computes its next token; then prompts get chunks of what the token budget
and the gap bound leave (chunks.py); then waiting branches are admitted, in the order of the policy, each
with room for all its known tokens and with an outlook on room to the end. Memory goes to the first in
rank: when a branch finds no room, one that ranks behind it is stopped, until it fits or is itself the last
in rank, and then it waits a step.

So the first in rank can always finish alone: submit() refused what an empty pool cannot hold, nobody ranks
before it, and who cannot be stopped any more has all the memory that it will ever need.

Nothing here reads a clock or draws a number. Steps are counted; times and costs are what the caller says.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from octavo.errors import CONTEXT_EXCEEDED
from octavo.kv import NoRoom, Sequence
from octavo.sched.admission import Admitter
from octavo.sched.chunks import PROBE, Draft
from octavo.sched.config import SchedulerConfig
from octavo.sched.costs import Costs
from octavo.sched.errors import NeverFits, QueueFull
from octavo.sched.lengths import Lengths
from octavo.sched.plan import Plan, PlanEntry
from octavo.sched.queue import SAMPLED_WEIGHT, Queue
from octavo.sched.reclaim import Reclaimer, widths
from octavo.sched.request import AnyPool, Branch, Request, State
from octavo.sched.stats import SchedulerStats


class Scheduler:
    """Continuous batching over a pool. Decides; never touches a tensor.

    `costs` is for the caller to replace as it measures; `running` and `waiting` are for it to read.
    """

    def __init__(self, pool: AnyPool, config: SchedulerConfig, lengths: Lengths | None = None) -> None:
        """lengths: what is known of output lengths from before."""
        self.pool = pool
        self.config = config
        self.costs = Costs()
        self.stats = SchedulerStats()
        self.waiting = Queue(config)
        self._memory = Reclaimer(pool, config, self.waiting, self.stats)
        self.running = self._memory.running
        self._lengths = lengths if lengths is not None else Lengths()
        self._admitter = Admitter(pool, config, self.waiting, self._memory, self._lengths, self.stats)
        self._arrivals = 0
        self._step = 0
        self._beside = 0  # plans with prompt chunks, one after another

    @property
    def has_work(self) -> bool:
        """Whether any branch waits or runs."""
        return bool(self.waiting or self.running)

    def check_fits(self, num_prompt: int, max_tokens: int, n: int = 1) -> None:
        """Raise NeverFits if such a request could not run even alone in an empty pool."""
        refusal = self._misfit(num_prompt, max_tokens, n)
        if refusal is not None:
            self.stats.refused["never_fits"] += 1
            raise refusal

    def check_queue(self, n: int = 1) -> None:
        """Raise QueueFull if `n` branches more may not be here now. O(branches)."""
        if self.config.max_queue is None:
            return
        limit = self.config.max_running + self.config.max_queue
        here = widths([*self.running, *self.waiting])
        if here + n > limit:
            self.stats.refused["queue_full"] += 1
            raise QueueFull(
                f"{here} sequences run or wait and the request asks for {n} more, but {limit} may: "
                "try again later, or raise max_queue",
                self._admitter.retry_after(here + n - limit),
            )

    def submit(self, request: Request, now: float = 0.0) -> None:
        """Queue a request. Raises NeverFits, with need, have and option, for what can never run, and
        QueueFull where too many wait."""
        self.check_fits(len(request.prompt), request.max_tokens, request.n)
        self.check_queue(request.n)
        request.arrival = self._arrivals
        request.arrived_at, request.submitted_at = self._step, now
        self._arrivals += 1
        first = Branch(request, 0, list(request.prompt))
        request.branches.append(first)
        request.made = 1
        self.waiting.push(first)

    def plan(self, now: float = 0.0) -> Plan:
        """Decide the next step and take its slots. Entries are empty only when nothing can run."""
        self._step += 1
        draft = Draft(self.config.max_batched_tokens, self.costs)
        self._plan_decodes(draft)
        first = self._plan_chunks(draft)
        self._admitter.admit(draft, self._step, now)
        if first is not None and (more := draft.chunk(first)):
            draft.choose(first, more)  # what the others left
        self._beside = self._beside + 1 if draft.has_chunks else 0
        if not draft.chosen and self.has_work:
            self._unblock(draft, now)
        entries = tuple(self._entry(branch, count) for branch, count in draft.chosen.items())
        stats = self.stats
        stats.peak_running = max(stats.peak_running, len(self.running))
        stats.peak_held_blocks = max(stats.peak_held_blocks, self.pool.stats().held)
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
            self._commit(entry, len(tokens))
            branch.idle = branch.request.beams and entry.num_samples > 0
            if entry.num_draft:
                branch.tokens += tokens
                self.stats.guessed += entry.num_draft
                self.stats.accepted += len(tokens) - 1
                grown.append(branch)
            elif tokens:
                grown += [branch, *(self.fork(branch) for _ in tokens[1:])]
                for grower, token in zip(grown[-len(tokens) :], tokens, strict=True):
                    grower.tokens.append(token)
            self.waiting.charge(branch.request, SAMPLED_WEIGHT * len(tokens))
        return grown

    def fork(self, branch: Branch) -> Branch:
        """Another branch of the same request, with the same tokens so far; KV is shared, none is computed.

        Where the branch's KV is not on the device, or no region is free for a contiguous copy, the other
        one waits and finds what is left of it."""
        request = branch.request
        child = Branch(request, request.made, list(branch.tokens), opened=branch.opened)
        child.computed = branch.computed
        request.made += 1
        request.branches.append(child)
        if branch.state is State.RUNNING:
            assert branch.kv is not None
            kv = branch.kv.fork()
            if kv.committed == branch.kv.committed:
                child.kv = kv
                self._memory.start(child)
                return child
            kv.close()
        self.waiting.push(child)
        return child

    def resume(self, branch: Branch, token: int) -> None:
        """An idle beam goes on with `token`."""
        branch.tokens.append(token)
        branch.idle = False

    def drop(self, branch: Branch) -> None:
        """A beam that lost: its blocks go back, and the request forgets it."""
        self._end(branch)
        branch.request.branches.remove(branch)

    def finish(self, branch: Branch) -> None:
        """A branch is done: its blocks go back; what it computed stays findable."""
        self._lengths.observe(branch.num_output, ended=branch.tokens_left > 0)
        self._end(branch)

    def abort(self, request: Request, *, spoiled: bool = False) -> None:
        """Give up every branch of a request, wherever it is. Not between plan() and complete().
        spoiled: its KV is wrong, so what it holds can be found no more."""
        for branch in request.branches:
            if branch.state is not State.FINISHED:
                self._lengths.observe(branch.num_output, ended=False)
                if spoiled and branch.kv is not None:
                    branch.kv.revoke()
                self._end(branch)

    def retract(self, plan: Plan, lost: Seq[Sequence]) -> Plan:
        """The KV of some sequences turned out to be gone before the plan ran: their branches wait and
        compute it again; returns the plan without them."""
        for branch in [b for b in (*self.running, *self.waiting) if b.kv is not None and b.kv in lost]:
            self._memory.lose(branch)
        kept = tuple(entry for entry in plan.entries if entry.branch.state is State.RUNNING)
        return plan._replace(entries=kept)

    def preempt(self, branch: Branch) -> None:
        """Make a running branch give all its blocks back and wait. Not between plan() and complete()."""
        self._memory.stop(branch, "recompute")

    def fail(self, plan: Plan) -> list[Request]:
        """The plan's forward pass raised: give up the requests in it, nothing of it published."""
        return self._give_up([entry.branch for entry in plan.entries])

    def give_up(self) -> list[Request]:
        """What had to be done before a plan raised: give up the requests that run."""
        return self._give_up(self.running)

    def _give_up(self, branches: Seq[Branch]) -> list[Request]:
        requests = list(dict.fromkeys(branch.request for branch in branches))
        for request in requests:
            self.abort(request)
        return requests

    # -- running branches ----------------------------------------------------------------------

    def _plan_decodes(self, draft: Draft) -> None:
        """The next token of every branch that decodes, as far as memory goes."""
        ranked = sorted(self.running, key=lambda b: self.waiting.rank(b, self._step))
        decodes = [branch for branch in ranked if branch.remaining == 1]
        for branch in decodes:
            if branch.state is State.RUNNING and self._memory.make_room(branch, 1, draft, self._step):
                draft.choose(branch, 1)
        for branch in decodes:
            if branch in draft.chosen:
                self._add_guesses(branch, draft)
        if any(branch.request.interactive for branch in draft.chosen):
            draft.limit(self.config.max_gap)
            if self._beside >= PROBE - 1:
                draft.no_chunks()

    def _add_guesses(self, branch: Branch, draft: Draft) -> None:
        """Let a decode check its guesses too, as far as budget and free memory go: nobody pays for them."""
        assert branch.kv is not None
        count = min(len(branch.draft), draft.budget)
        if count and not isinstance(branch.kv.reserve(1 + count), NoRoom):
            draft.choose(branch, count)

    def _plan_chunks(self, draft: Draft) -> Branch | None:
        """A chunk for every prompt being computed, as far as the room goes. Returns the first in rank."""
        ranked = sorted(
            (b for b in self.running if b.remaining > 1), key=lambda b: self.waiting.rank(b, self._step)
        )
        for branch in [*ranked[:1], *sorted(ranked[1:], key=lambda b: b.remaining)]:
            first = branch is ranked[0]
            share = 0.5 if first and (len(ranked) > 1 or bool(self.waiting)) else 1.0
            count = draft.chunk(branch, share, first=first)
            if (
                count
                and branch.state is State.RUNNING
                and self._memory.make_room(branch, count, draft, self._step)
            ):
                draft.choose(branch, count)
        return ranked[0] if ranked and ranked[0] in draft.chosen else None

    # -- when nothing can run ------------------------------------------------------------------

    def _unblock(self, draft: Draft, now: float) -> None:
        """Nothing can run: others give way to the first in rank, one by one, beginning with idle beams and
        the last in rank; it is given up if all that is not enough."""
        everybody = [b for b in (*self.running, *self.waiting) if not b.idle or b.state is State.RUNNING]
        order = {branch: self.waiting.rank(branch, self._step) for branch in everybody}
        first = min((branch for branch in everybody if not branch.idle), key=order.__getitem__)
        others = sorted(everybody, key=lambda b: (b.idle, order[b]))
        while not self._start_first(first, draft, now):
            other = others.pop() if others else None
            if other is None:
                self.stats.gave_up += 1
                self._end(first)
                draft.stuck.append(first)
                return
            if other is first:
                continue
            if other.state is State.RUNNING:
                self._memory.stop(other, "recompute", draft)
            elif other.kv is not None and other.kv.on_device:
                self._memory.release(other)

    def _start_first(self, first: Branch, draft: Draft, now: float) -> bool:
        """Give the first in rank its tokens, if there is room for them."""
        if first.state is State.RUNNING:
            count = min(first.remaining, draft.budget)
            if self._memory.make_room(first, count, draft, self._step):
                draft.choose(first, count)
            return first in draft.chosen
        return self._admitter.start_alone(first, draft, self._step, now)

    # -- the rest ------------------------------------------------------------------------------

    def _entry(self, branch: Branch, count: int) -> PlanEntry:
        assert branch.kv is not None
        start = branch.kv.length
        slots = branch.kv.extend(count)
        known = len(branch.tokens)
        guesses = max(0, start + count - known)
        tokens = branch.tokens[start : start + count] + branch.draft[:guesses]
        samples = 0
        if start + count >= known:
            samples = 1 if branch.request.beams else branch.width
        return PlanEntry(branch, start, tokens, slots, samples, guesses)

    def _commit(self, entry: PlanEntry, accepted: int) -> None:
        """What an entry computed has been written. accepted: with guesses, tokens that turned out right."""
        branch, stats = entry.branch, self.stats
        kv, count = branch.kv, len(entry.tokens)
        assert kv is not None
        stats.computed += count
        stats.recomputed += max(0, min(entry.start + count, branch.computed) - entry.start)
        if entry.num_draft:
            kv.commit(entry.tokens[:accepted])
            kv.truncate(kv.committed)
        else:
            # Those that open() was given need not be read again: their number is enough.
            kv.commit(count if entry.start + count <= branch.opened else entry.tokens)
        branch.computed = max(branch.computed, kv.committed)
        branch.request.scored = max(branch.request.scored, kv.committed)

    def _end(self, branch: Branch) -> None:
        if branch.state is State.RUNNING:
            self.running.remove(branch)
            self._memory.short = False
        elif branch.state is State.WAITING:
            self.waiting.remove(branch)
        branch.state = State.FINISHED
        self.stats.finished += 1
        self._memory.release(branch)

    def _misfit(self, num_prompt: int, max_tokens: int, n: int) -> NeverFits | None:
        config, total = self.config, num_prompt + max_tokens
        if total > config.max_model_len:
            return NeverFits(
                f"the prompt's {num_prompt} tokens and max_tokens {max_tokens} make {total}, but the context "
                f"holds {config.max_model_len}: shorten the prompt, lower max_tokens or raise max_model_len",
                param="max_tokens" if num_prompt < config.max_model_len else "prompt",
                code=CONTEXT_EXCEEDED,
            )
        fit = self.pool.can_ever_fit(max(num_prompt, total - 1))  # the last sampled token needs no slot
        if not fit:
            return NeverFits(
                f"{num_prompt} prompt tokens and {max_tokens} to sample need {fit.need} blocks of "
                f"{self.pool.block_size}, but the pool has {fit.have}: lower max_tokens or raise kv_memory",
                param="max_tokens",
            )
        if n > config.max_running:
            return NeverFits(
                f"n = {n} sequences, but at most {config.max_running} run at once: "
                "lower n or raise max_num_seqs and max_batched_tokens",
                param="n",
            )
        return None
