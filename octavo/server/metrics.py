"""GET /metrics: what the engine did and does, for Prometheus.

    engine thread --Observer--> RequestTimes    counts and histograms of requests
    engine        --at a scrape--> gauges and counters of scheduler, pool and tiers

Names are vLLM's, after the prefix `octavo_`, wherever the meaning is the same; `/metrics?prefix=vllm:` gives
the very names that a dashboard made for vLLM asks for. The default has no colon: Prometheus keeps that for
recording rules, and its linter fails on one. A scrape reads what the engine's thread writes, without a lock:
each number is a recent one.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from octavo.engine.observe import Observer
from octavo.errors import InvalidRequest
from octavo.server.context import ServerContext

if TYPE_CHECKING:
    from octavo.engine.engine import Engine
    from octavo.engine.outputs import RequestDelta
    from octavo.sched import Plan
    from octavo.sched import Request as EngineRequest

PREFIX = "octavo_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX_FORM = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,63}:?")

# Bounds in seconds and in tokens; those of the latencies are vLLM's, so that its dashboards' quantiles agree.
_FIRST_TOKEN = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
)
_FIRST_TOKEN_SLOW = (40.0, 80.0, 160.0, 640.0, 2560.0)
_GAP = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
_STEP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Histogram:
    """Counts of observations by bound, and their sum. One thread observes."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self.name, self.text = name, text
        self._bounds = tuple(float(bound) for bound in bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value` as if seen `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self, prefix: str, model: str) -> Metric:
        """The values now, as prometheus_client has them."""
        counts, total, buckets = list(self._counts), 0, []
        for bound, count in zip((*self._bounds, "+Inf"), counts, strict=True):
            total += count
            buckets.append((str(bound), float(total)))
        family = HistogramMetricFamily(prefix + self.name, self.text, labels=["model_name"])
        family.add_metric([model], buckets, self._sum)
        return family


@dataclass(slots=True)
class _Open:
    """A request that is not over: when it came, was first computed, and gave each sequence's last token."""

    request: EngineRequest
    arrived: float
    started: float | None = None
    first: float | None = None
    last: dict[int, float] = field(default_factory=dict)
    generated: int = 0


class RequestTimes(Observer):
    """Counts tokens and measures waits on the engine's thread: about a microsecond per sequence and step."""

    def __init__(self) -> None:
        self.prompt_tokens = self.generation_tokens = self.queries = self.hits = self.steps = 0
        self.finished: Counter[str] = Counter(dict.fromkeys(("stop", "length", "abort", "error"), 0))
        self.first_token = Histogram(
            "time_to_first_token_seconds",
            "Seconds from a request's arrival to its first token.",
            (*_FIRST_TOKEN, *_FIRST_TOKEN_SLOW),
        )
        self.gap = Histogram("inter_token_latency_seconds", "Seconds between two tokens of a sequence.", _GAP)
        self.whole = Histogram(
            "e2e_request_latency_seconds", "Seconds from a request's arrival to its end.", _WHOLE
        )
        self.queued = Histogram(
            "request_queue_time_seconds", "Seconds until a request was first scheduled.", _WHOLE
        )
        self.prefill = Histogram(
            "request_prefill_time_seconds", "Seconds from first scheduled to the first token.", _WHOLE
        )
        self.decode = Histogram(
            "request_decode_time_seconds", "Seconds from the first token to the end.", _WHOLE
        )
        self.prompts = Histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self.outputs = Histogram(
            "request_generation_tokens", "Tokens generated for a finished request, all sequences.", _TOKENS
        )
        self.step_tokens = Histogram("iteration_tokens", "Tokens that a step computed.", _TOKENS)
        self.step_time = Histogram("iteration_seconds", "Seconds from a step's plan to its commit.", _STEP)
        self._open: dict[int, _Open] = {}
        self._unstarted: dict[EngineRequest, _Open] = {}
        self._planned = 0.0

    def added(self, request_id: int, request: EngineRequest, arrived: float) -> None:
        record = self._open[request_id] = self._unstarted[request] = _Open(request, arrived)
        record.arrived = arrived

    def planned(self, plan: Plan) -> None:
        self._planned = now = time.monotonic()
        if plan.entries:
            self.step_tokens.observe(plan.num_tokens)
        if not self._unstarted:
            return
        for entry in plan.entries:
            record = self._unstarted.pop(entry.branch.request, None)
            if record is not None:
                record.started = now
                self.queued.observe(now - record.arrived)
                size = len(record.request.prompt)
                self.prompts.observe(size)
                self.prompt_tokens += size
                self.queries += size
                self.hits += record.request.num_cached or 0

    def stepped(self, deltas: Sequence[RequestDelta]) -> None:
        now = time.monotonic()
        self.steps += 1
        self.step_time.observe(now - self._planned)
        for delta in deltas:
            record = self._open.get(delta.request_id)
            if record is None:
                continue
            for sequence in delta.deltas:
                self._grown(record, sequence.index, len(sequence.token_ids), now)
                if sequence.finish_reason is not None:
                    self.finished[sequence.finish_reason] += 1
            if delta.finished or delta.error is not None:
                self.finished["error"] += delta.error is not None
                self._end(delta.request_id, now)

    def aborted(self, request_id: int) -> None:
        if request_id in self._open:
            self.finished["abort"] += 1
            self._end(request_id, time.monotonic())

    def _grown(self, record: _Open, index: int, count: int, now: float) -> None:
        """Sequence `index` got `count` tokens."""
        if count == 0:
            return
        last = record.last.get(index)
        if record.first is None:
            record.first = now
            self.first_token.observe(now - record.arrived)
            if record.started is not None:
                self.prefill.observe(now - record.started)
        if last is not None:
            self.gap.observe((now - last) / count, count)
        record.last[index] = now
        record.generated += count
        self.generation_tokens += count

    def _end(self, request_id: int, now: float) -> None:
        record = self._open.pop(request_id)
        self._unstarted.pop(record.request, None)
        self.whole.observe(now - record.arrived)
        self.outputs.observe(record.generated)
        if record.first is not None:
            self.decode.observe(now - record.first)

    def histograms(self) -> list[Histogram]:
        """All of them."""
        return [value for value in vars(self).values() if isinstance(value, Histogram)]


class Metrics(Collector):
    """Everything that /metrics shows of one engine. Cost of a scrape: O(blocks), some 10 ns each."""

    def __init__(self, engine: Engine, prefix: str = PREFIX, times: RequestTimes | None = None) -> None:
        self._engine = engine
        self._prefix = prefix
        if times is None:
            times = RequestTimes()
            engine.observers.append(times)
        self.times = times

    def text(self, prefix: str = PREFIX) -> bytes:
        """The exposition format, with every name under `prefix`."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(Metrics(self._engine, prefix, self.times))
        return generate_latest(registry)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        model = self._engine.model_name
        for histogram in self.times.histograms():
            yield histogram.family(self._prefix, model)

    def _gauge(self, name: str, text: str, values: dict[str, float] | float, label: str = "") -> Metric:
        family = GaugeMetricFamily(
            self._prefix + name, text, labels=["model_name", *([label] if label else [])]
        )
        model = self._engine.model_name
        for key, value in values.items() if isinstance(values, dict) else [("", values)]:
            family.add_metric([model, key] if label else [model], value)
        return family

    def _counter(self, name: str, text: str, values: dict[str, float] | float, label: str = "") -> Metric:
        labels = ["model_name", *([label] if label else [])]
        family = CounterMetricFamily(self._prefix + name, text, labels=labels)
        model = self._engine.model_name
        for key, value in values.items() if isinstance(values, dict) else [("", values)]:
            family.add_metric([model, key] if label else [model], value)
        return family

    def _gauges(self) -> Iterator[Metric]:
        engine = self._engine
        pool, scheduler = engine.pool.stats(), engine.scheduler
        running = list(scheduler.running)
        yield self._gauge("num_requests_running", "Sequences that are being computed.", len(running))
        yield self._gauge("num_requests_waiting", "Sequences that wait for room.", len(scheduler.waiting))
        share = pool.held / pool.num_blocks
        yield self._gauge("kv_cache_usage_perc", "Share of the blocks that are held; 1 is all.", share)
        states: dict[str, float] = {"free": pool.free, "held": pool.held, "cached": pool.cached}
        yield self._gauge("blocks", "Blocks of the device by state.", states, "state")
        yield self._gauge(
            "shared_blocks", "Held blocks that more than one holder has.", engine.pool.num_shared()
        )
        size = engine.pool.block_size
        handles = [branch.kv for branch in running]
        unused = sum(kv.capacity - kv.length for kv in handles if kv is not None and not kv.closed)
        yield self._gauge(
            "unused_slots", "Token slots that running sequences reserved and have not filled.", unused
        )
        for name, tier in (("host", pool.host), ("disk", pool.disk)):
            if tier.slots:
                states = {"free": tier.free, "held": tier.held, "cached": tier.cached}
                yield self._gauge(f"{name}_blocks", f"Blocks of the {name} tier by state.", states, "state")
        info = GaugeMetricFamily(
            f"{self._prefix}cache_config_info",
            "Settings of the KV cache as labels; the value is 1.",
            labels=["model_name", "block_size", "num_gpu_blocks", "enable_prefix_caching"],
        )
        caching = str(engine.pool.prefix_caching)
        info.add_metric([engine.model_name, str(size), str(pool.num_blocks), caching], 1)
        yield info

    def _counters(self) -> Iterator[Metric]:
        pool, scheduler, times = self._engine.pool.stats(), self._engine.scheduler.stats, self.times
        rows: list[tuple[str, str, float]] = [
            ("num_preemptions", "Sequences that gave their blocks back to make room.", scheduler.preemptions),
            ("prompt_tokens", "Prompt tokens of requests that were started.", times.prompt_tokens),
            ("generation_tokens", "Tokens generated.", times.generation_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", times.queries),
            ("prefix_cache_hits", "Prompt tokens found there.", times.hits),
            ("computed_tokens", "Tokens computed, those computed again included.", scheduler.computed),
            ("recomputed_tokens", "Tokens computed again after a preemption.", scheduler.recomputed),
            ("iterations", "Steps of the engine.", times.steps),
            ("spec_decode_num_draft_tokens", "Tokens guessed by speculation.", scheduler.guessed),
            ("spec_decode_num_accepted_tokens", "Guessed tokens that came true.", scheduler.accepted),
            ("swapped_out_blocks", "Blocks moved to host memory by preemption.", scheduler.swapped_out),
            ("swapped_in_blocks", "Blocks brought back after it.", scheduler.swapped_in),
            ("block_copies", "Blocks copied, in whole or in part, before a write.", pool.copies),
            ("block_merges", "Blocks given up for equal ones.", pool.merges),
            ("block_evictions", "Cached blocks that left the device.", pool.evictions),
            ("block_demotions", "Blocks moved to a lower tier.", pool.demotions),
            ("block_promotions", "Blocks brought back from a lower tier.", pool.promotions),
        ]
        for name, text, value in rows:
            yield self._counter(name, text, value)
        for name, text, label, counts in (
            ("preemptions_by_mode", "The same by what became of their KV.", "mode", scheduler.preempted),
            (
                "blocked_iterations",
                "Steps in which somebody waited, by what for.",
                "reason",
                scheduler.blocked,
            ),
            ("refused_requests", "Requests that were not queued, by reason.", "reason", scheduler.refused),
        ):
            yield self._counter(name, text, dict(counts), label)
        finished: dict[str, float] = dict(times.finished)
        text = "Sequences that ended, by reason; a request that was given up or failed counts once."
        yield self._counter("request_success", text, finished, "finished_reason")


router = APIRouter()


@router.get("/metrics", response_model=None)
async def metrics(request: Request, prefix: str = PREFIX) -> Response:
    """The metrics in Prometheus' text format; 503 while the model is loading."""
    assert request.app.state.context.engine is not None  # raises while there is none
    if not _PREFIX_FORM.fullmatch(prefix):
        raise InvalidRequest(
            "prefix must be letters, digits and underscores, perhaps with a colon at its end", param="prefix"
        )
    context: ServerContext = request.app.state.context
    context.engine  # noqa: B018 - raises while loading
    return Response(request.app.state.metrics.text(prefix), media_type=CONTENT_TYPE)
