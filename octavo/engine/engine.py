"""The engine: requests in, deltas out, one step at a time.

    add_request -> Scheduler.plan -> Runner.forward -> sample -> Scheduler.complete -> deltas
                        ^                                               |
                        +------------------- step() -------------------+

Single-threaded: one thread calls add_request, step and abort. A step that raises ends the requests in
it, with the error, and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from octavo.attention import AttentionBackend, make_backend
from octavo.engine.activations import step_activations
from octavo.engine.assembly import beam_deltas, delta_of, grow
from octavo.engine.beam_steps import advance_beams
from octavo.engine.config import DTYPES, STORED, Budget, EngineConfig
from octavo.engine.costs import StepMeter
from octavo.engine.cpus import set_threads
from octavo.engine.defaults import choose_format, shape_of
from octavo.engine.draft import DraftModel
from octavo.engine.errors import BadLogits, StepFailed
from octavo.engine.intake import Intake, Resolved
from octavo.engine.live import Live
from octavo.engine.memory import available_memory
from octavo.engine.observe import Observer
from octavo.engine.outputs import RequestDelta, SequenceDelta
from octavo.engine.params import SamplingParams
from octavo.engine.propose import OwnText, Proposer, wanted
from octavo.engine.runner import Runner, sampled_rows
from octavo.engine.sampling import Choice, choose, mask_jobs, score_prompts
from octavo.engine.scheduling import make_pool, make_scheduler
from octavo.engine.start_table import start_rows
from octavo.engine.tiers.setup import open_tiers
from octavo.kv import Pool, PoolStats
from octavo.models import LoadedModel, Tokenizer, load_model
from octavo.sched import Branch, Plan, Request, SchedulerStats, Stuck


class Engine:
    """A model, its KV cache and a scheduler.

    Raises ConfigError for options that cannot be honoured on this model.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        backend: AttentionBackend | None = None,
        *,
        pool: Callable[[Budget], Pool] | None = None,
        draft: LoadedModel | None = None,
    ) -> None:
        """pool: makes another pool than the paged one, to compare with. draft: the draft model, if it is
        loaded already."""
        if draft is None and config.draft_model is not None:
            draft = load_model(config.draft_model, DTYPES[config.dtype], config.weights)
        self.config = config
        self.model = model
        self.threads = set_threads(config.threads)
        self.backend = backend if backend is not None else make_backend()
        weights_dtype = str(model.decoder.dtype).removeprefix("torch.")
        self.kv_format = choose_format(config, weights_dtype, model.decoder.quantised, self.backend)
        context = model.config.position_limit or model.config.max_position_embeddings
        self.activations = step_activations(
            config,
            model.decoder,
            draft.config if draft is not None else None,
            self.backend,
            STORED[self.kv_format.dtype],
        )
        self.budget = Budget.plan(
            config,
            shape_of(model.config, self.kv_format.dtype),
            context,
            available_memory(),
            default_block_size=self.kv_format.block_size,
            activations=self.activations.bytes,
            draft=shape_of(draft.config, self.kv_format.dtype) if draft is not None else None,
        )
        self.pool = pool(self.budget) if pool is not None else make_pool(config, self.budget)
        self.scheduler = make_scheduler(config, self.budget, self.pool)
        self.meter = StepMeter()
        self.runner = Runner(
            model,
            self.backend,
            self.budget.num_blocks,
            self.budget.block_size,
            kv_dtype=STORED[self.kv_format.dtype],
            checked=config.checked,
        )
        self.mover = open_tiers(config, model, self.runner.caches, self.pool)
        self.observers: list[Observer] = []
        self._live: dict[int, Live] = {}
        self._by_request: dict[Request, Live] = {}
        self.draft: DraftModel | None = None
        self._proposer: Proposer | None = OwnText(config.speculate) if config.speculate else None
        if draft is not None:
            self.draft = self._proposer = DraftModel(
                draft, model, config, self.budget, self.backend, self.kv_format.dtype
            )
        guesses = config.speculate if draft is None else 0
        self._intake = Intake(model, self.scheduler, self.budget.max_model_len, guesses)
        self._next_id = 0

    @classmethod
    def from_config(cls, config: EngineConfig) -> Engine:
        """Load the model that the options name and build an engine on it. Raises ModelError, ConfigError."""
        set_threads(config.threads)  # before the weights are converted
        return cls(load_model(config.model, DTYPES[config.dtype], config.weights), config)

    # -- what callers ask ----------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; safe to use from any thread."""
        return self.model.tokenizer

    @property
    def model_name(self) -> str:
        """The name that the model was asked for by."""
        return self.model.name

    @property
    def max_model_len(self) -> int:
        """Tokens that a prompt and its output may have together."""
        return self.budget.max_model_len

    @property
    def vocab_size(self) -> int:
        """Valid token ids are 0..vocab_size-1."""
        return self.model.config.vocab_size

    @property
    def has_work(self) -> bool:
        """Whether step() has anything to do."""
        return self.scheduler.has_work

    @property
    def pool_stats(self) -> PoolStats:
        """Blocks by state, and counts since the start."""
        return self.pool.stats()

    @property
    def scheduler_stats(self) -> SchedulerStats:
        """Counts since the start."""
        return self.scheduler.stats

    def resolve(self, prompt: Sequence[int], params: SamplingParams, salt: str | None = None) -> Resolved:
        """Check a request, settle its max_tokens and compile the form it wants, for submit(). Changes
        nothing; safe from any thread. salt: cached KV is shared only among requests of an equal one.

        Cost: O(prompt); up to seconds where slow_to_resolve() says so, which is not for an event loop.
        Raises InvalidRequest (NeverFits among them) naming the field, the number and the limit.
        """
        return self._intake.resolve(prompt, params, salt)

    def add_request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        arrived: float | None = None,
        salt: str | None = None,
        priority: int = 0,
        tenant: str = "",
        interactive: bool = True,
    ) -> int:
        """Queue a prompt of token ids: resolve() and submit(). Raises as both do."""
        return self.submit(
            self.resolve(prompt, params, salt),
            arrived=arrived,
            priority=priority,
            tenant=tenant,
            interactive=interactive,
        )

    def submit(
        self,
        resolved: Resolved,
        *,
        arrived: float | None = None,
        priority: int = 0,
        tenant: str = "",
        interactive: bool = True,
    ) -> int:
        """Queue a request that was resolved, once; returns the id that its deltas carry. Raises QueueFull
        where max_queue sequences wait.

        arrived: when the caller asked, in seconds of time.monotonic(); now if not given. For observers.
        priority: higher goes first, with the schedule "priority". tenant: whose share it is charged to,
        with "fair". interactive: somebody reads the tokens as they come, so a long prompt of another
        request may not hold them up; without, the whole machine may go to a prompt for a while.
        """
        request = resolved.request
        request.priority, request.tenant, request.interactive = priority, tenant, interactive
        if interactive:
            self.runner.keep_ahead()
        self.scheduler.submit(request, time.monotonic())
        live = self._intake.live(self._next_id, resolved)
        self._next_id += 1
        self._live[live.id] = live
        self._by_request[request] = live
        for observer in self.observers:
            observer.added(live.id, request, time.monotonic() if arrived is None else arrived)
        return live.id

    def request_id(self, request: Request) -> int:
        """The id of a request that has not ended."""
        return self._by_request[request].id

    def abort(self, request_id: int) -> None:
        """Give up a request, wherever it is; what it computed stays reusable. Unknown ids are ignored:
        it may have finished in the meantime."""
        live = self._live.get(request_id)
        if live is not None:
            self.scheduler.abort(live.request)
            self._forget(live)
            if self._proposer is not None:
                self._proposer.settle()
            for observer in self.observers:
                observer.aborted(request_id)

    def step(self) -> list[RequestDelta]:
        """Plan, compute and sample once; returns what each request in the step gained."""
        deltas = self._step()
        if self._proposer is not None:
            self._proposer.settle()
        for observer in self.observers:
            observer.stepped(deltas)
        return deltas

    def _step(self) -> list[RequestDelta]:
        self.scheduler.costs = self.meter.costs
        try:
            self._guess()
        except Exception as error:
            return self._fail(self.scheduler.give_up(), error)
        began = time.monotonic()
        plan = self._carry_out(self.scheduler.plan(began))
        for observer in self.observers:
            observer.planned(plan)
        deltas = [self._stuck(branch) for branch in plan.stuck]
        if not plan.entries:
            return deltas
        try:
            jobs = mask_jobs(plan, self._by_request)
            masks = self._intake.grammars.begin(jobs) if jobs else None  # beside the forward pass
            hidden = self.runner.forward(plan, self.pool.tables)
            score_prompts(plan, hidden, self.runner, self._by_request)
            logits = self.runner.logits(sampled_rows(plan, hidden))
            choices = choose(plan, logits, self._by_request, masks.result() if masks else None)
        except Exception as error:
            return deltas + self._fail(self.scheduler.fail(plan), error)
        grown = self._grow(plan, choices)
        self.meter.step(plan, time.monotonic() - began)
        for live in {self._by_request[entry.branch.request]: None for entry in plan.entries}:
            if live.error is not None:
                grown.setdefault(live, [])
            elif live.search is not None and advance_beams(live, self.scheduler):
                grown[live] = beam_deltas(live)
        found = [self._delta(live, changes) for live, changes in grown.items()]
        return deltas + [delta for delta in found if delta is not None]

    def close(self) -> None:
        """Put what is cached on disk, where there is a disk tier, and close the tiers. The engine must
        be idle; it is of no use after."""
        self.runner.close()
        if self.mover is not None:
            self.pool.persist()
            self.mover.apply(self.pool.drain().transfers)
            self.mover.close()
            self.mover = None

    def describe(self) -> list[tuple[str, str]]:
        """Rows for the start-up table: what runs, what memory it takes, what is on and off and why."""
        return start_rows(self, self._proposer)

    # -- a step --------------------------------------------------------------------------------

    def _carry_out(self, plan: Plan) -> Plan:
        """Do the plan's transfers; what could not be moved is computed again instead."""
        if self.mover is None or not plan.actions.transfers:
            return plan
        began = time.monotonic()
        failed = self.mover.apply(plan.actions.transfers)
        self.meter.transfers(len(plan.actions.transfers), time.monotonic() - began)
        for place in failed:
            plan = self.scheduler.retract(plan, self.pool.lost(place))
        return plan

    def _guess(self) -> None:
        """Let running sequences guess what comes next, for the step to check. What a draft raises ends the
        requests that run, as what the model raises does."""
        running = self.scheduler.running
        if self._proposer is None or not running:
            return
        try:
            self._proposer.propose(wanted(running, self._by_request), len(running))
        except Exception:
            if self.draft is not None:
                self.draft.drop()
            raise

    def _grow(self, plan: Plan, choices: list[list[Choice]]) -> dict[Live, list[SequenceDelta]]:
        """Complete the plan with what was sampled; returns what each request's branches gained."""
        sampled = [[choice.token for choice in entry] for entry in choices]
        grown: dict[Live, list[SequenceDelta]] = {}
        branches = iter(self.scheduler.complete(plan, sampled))
        for entry, made in zip(plan.entries, choices, strict=True):
            live = self._by_request[entry.branch.request]
            if entry.num_draft:
                live.checked(entry.num_draft, len(made) - 1)
                if self._proposer is not None:
                    self._proposer.checked(live, entry.branch, entry.num_draft, len(made) - 1)
                grown.setdefault(live, []).append(self._extend(live, next(branches), made))
                continue
            for choice in made:
                grown.setdefault(live, []).append(self._extend(live, next(branches), [choice]))
        return grown

    def _extend(self, live: Live, branch: Branch, choices: Sequence[Choice]) -> SequenceDelta:
        """A branch got these tokens, of which those after its end do not count."""
        length = len(branch.tokens) - len(live.request.prompt) - len(choices)
        delta = SequenceDelta(branch.index)
        for choice in choices:
            length += 1
            delta.add(grow(live, branch, choice, length))
            if live.error is not None:
                break  # what becomes of it is for _delta() to say
            if delta.finish_reason is not None:
                self.scheduler.finish(branch)
                break
        return delta

    def _delta(self, live: Live, changes: list[SequenceDelta]) -> RequestDelta | None:
        if live.error is not None:
            self.scheduler.abort(live.request, spoiled=isinstance(live.error, BadLogits))
            return self._error(live, live.error)
        delta = delta_of(live, changes)
        if live.request.finished:
            self._forget(live)
        return delta

    def _error(self, live: Live, error: Exception) -> RequestDelta:
        """The last delta of a request that was given up."""
        delta = delta_of(live, [], error)
        assert delta is not None
        self._forget(live)
        return delta

    def _fail(self, requests: Sequence[Request], error: Exception) -> list[RequestDelta]:
        """The step raised: its requests end with the error, and everything else goes on."""
        failed = StepFailed(f"the step that computed this request failed: {type(error).__name__}: {error}")
        failed.__cause__ = error
        return [self._error(self._by_request[request], failed) for request in requests]

    def _stuck(self, branch: Branch) -> RequestDelta:
        """A request that found no room though it ran alone."""
        live = self._by_request[branch.request]
        self.scheduler.abort(live.request)
        error = Stuck(
            f"the request needs more than the {self.pool.num_blocks} blocks of the pool: raise kv_memory"
        )
        return self._error(live, error)

    def _forget(self, live: Live) -> None:
        del self._live[live.id], self._by_request[live.request]
