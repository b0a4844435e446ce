"""The engine on its own thread, read from asyncio."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from octavo import SamplingParams
from octavo.engine import EngineDead, EngineThread, StepFailed, StructuredOutputs
from octavo.engine.grammar import Grammars
from octavo.engine.origin import Origin
from octavo.engine.outputs import RequestDelta, SequenceDelta
from octavo.engine.thread import KEPT_STEPS, RESOLVING_THREADS, _Stream
from octavo.errors import InvalidRequest
from octavo.models import LoadedModel
from tests.engine.helpers import Hold, idle, keep_in_step, llm_on

Tiny = tuple[LoadedModel, Any]


@pytest.fixture
def thread(tiny: Tiny) -> Iterator[EngineThread]:
    thread = EngineThread(llm_on(tiny[0], num_blocks=64, max_num_seqs=4).engine)
    thread.start()
    yield thread
    thread.shutdown(10)
    assert not thread.alive


def params(count: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **more)


async def collect(thread: EngineThread, prompt: list[int], want: SamplingParams) -> list[int]:
    return [t async for d in thread.stream(prompt, want) for change in d.deltas for t in change.token_ids]


async def until_idle(thread: EngineThread) -> None:
    """Wait for the engine to have given everything back."""
    for _ in range(6000):
        stats = thread.stats()
        if not (stats["num_running"] or stats["num_waiting"] or stats["blocks_held"]):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"not idle: {thread.stats()}")


def test_streams_equal_offline_generation(thread: EngineThread, tiny: Tiny) -> None:
    """Ten concurrent streams, each as if generated alone offline."""
    prompts = [[i, i + 1, i + 2] for i in range(10)]

    async def main() -> list[list[int]]:
        return await asyncio.gather(*(collect(thread, p, params(12)) for p in prompts))

    outputs = llm_on(tiny[0]).generate(prompts, params(12), use_tqdm=False)
    assert asyncio.run(main()) == [o.outputs[0].token_ids for o in outputs]


def test_bad_input_is_refused_before_anything_is_queued(thread: EngineThread) -> None:
    """stream() raises InvalidRequest at its first step."""
    with pytest.raises(InvalidRequest, match="empty"):
        asyncio.run(collect(thread, [], params(1)))
    assert thread.stats()["num_waiting"] == 0


def test_leaving_a_stream_aborts_only_its_request(thread: EngineThread) -> None:
    """Consumers leave while queued, mid-stream and before they began; the others come out whole and nothing
    is held."""
    scheduler = thread.engine.scheduler
    full = Hold(thread, lambda: len(scheduler.running) == 4 and len(scheduler.waiting) == 3)
    middle = Hold(
        thread, lambda: any(len(b.tokens) > 8 and b.tokens[:3] == [1, 2, 3] for b in scheduler.running)
    )

    async def main() -> list[int]:
        keeper = asyncio.create_task(collect(thread, [9, 9], params(60)))
        queued = [asyncio.create_task(collect(thread, [i], params(200))) for i in range(6)]
        await asyncio.to_thread(full.wait)
        await thread.stream([1, 2], params(200)).aclose()
        for task in queued:
            task.cancel()
        full.go_on()
        stream = thread.stream([1, 2, 3], params(200))
        count = sum(len(change.token_ids) for change in (await anext(stream)).deltas)
        assert 0 < count < 200
        await stream.aclose()
        middle.go_on()
        tokens = await keeper
        await until_idle(thread)
        return tokens

    assert len(asyncio.run(main())) == 60


def test_a_failed_step_reaches_its_streams_only(thread: EngineThread) -> None:
    """The stream whose step raised gets StepFailed; the engine serves the next."""
    forward = thread.engine.runner.forward

    def failing(plan: Any, tables: Any) -> Any:
        if any(66 in entry.tokens for entry in plan.entries):
            raise RuntimeError("boom")
        return forward(plan, tables)

    thread.engine.runner.forward = failing  # type: ignore[method-assign]
    with pytest.raises(StepFailed, match="boom"):
        asyncio.run(collect(thread, [66], params(5)))
    assert thread.alive
    assert len(asyncio.run(collect(thread, [1], params(2)))) == 2


def test_a_dead_engine_fails_open_streams_at_once(tiny: Tiny) -> None:
    """An error outside a step's own work ends the thread: streams get EngineDead, later ones too."""
    thread = EngineThread(llm_on(tiny[0]).engine)
    hold = Hold(thread, lambda: bool(thread.engine.scheduler.running))
    thread.start()

    async def main() -> None:
        task = asyncio.create_task(collect(thread, [1, 2], params(400)))
        await asyncio.to_thread(hold.wait)
        thread.engine.scheduler.plan = None  # type: ignore[method-assign, assignment]
        hold.go_on()
        with pytest.raises(EngineDead, match="TypeError"):
            await task

    asyncio.run(main())
    assert not thread.alive
    with pytest.raises(EngineDead):
        asyncio.run(collect(thread, [1], params(1)))
    thread.shutdown(5)


def test_shutdown_ends_the_thread_and_tells_open_streams(tiny: Tiny) -> None:
    """After shutdown() no thread is left, nothing is held, and an open stream has its error."""
    llm = llm_on(tiny[0])
    thread = EngineThread(llm.engine)
    hold = Hold(thread, lambda: bool(thread.engine.scheduler.running))
    thread.start()

    async def main() -> None:
        task = asyncio.create_task(collect(thread, [1, 2], params(400)))
        await asyncio.to_thread(hold.wait)
        await asyncio.to_thread(thread.shutdown, 60)
        with pytest.raises(EngineDead, match="shut down"):
            await task

    asyncio.run(main())
    assert not any(t.name == "octavo-engine" for t in threading.enumerate())
    idle(llm)


@pytest.fixture
def slow_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Forms are compiled only once the event is set; none on the engine's thread or an event loop's."""
    gate, compile_ = threading.Event(), Grammars._compile

    def waiting(self: Grammars, kind: str, text: str) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        assert threading.current_thread().name != "octavo-engine"
        assert gate.wait(60)
        return compile_(self, kind, text)

    monkeypatch.setattr(Grammars, "_compile", waiting)
    yield gate
    gate.set()


def form(number: int) -> StructuredOutputs:
    return StructuredOutputs(regex=f"[ab]{{3}}{number}")


def test_slow_compiles_hold_up_nobody(thread: EngineThread, slow_compiler: threading.Event) -> None:
    """While more forms than there are threads for them are being compiled, other streams begin and end;
    then all of them have their form, a wrong one its refusal, and one that was left was never queued."""
    forms = range(RESOLVING_THREADS + 2)

    async def main() -> tuple[list[list[int]], BaseException]:
        waiting = [
            asyncio.create_task(collect(thread, [i], SamplingParams(structured_outputs=form(i), seed=i)))
            for i in forms
        ]
        wrong = asyncio.create_task(
            collect(thread, [1], SamplingParams(structured_outputs=StructuredOutputs(regex="(")))
        )
        left = asyncio.create_task(collect(thread, [1], SamplingParams(structured_outputs=form(9))))
        for i in range(3):
            assert len(await collect(thread, [i, i], params(30))) == 30
        assert not any(task.done() for task in (*waiting, wrong, left))
        left.cancel()
        slow_compiler.set()
        with pytest.raises(asyncio.CancelledError):
            await left
        found, refused = await asyncio.gather(*waiting), await asyncio.gather(wrong, return_exceptions=True)
        await until_idle(thread)
        return found, refused[0]

    found, refused = asyncio.run(main())
    for number, tokens in enumerate(found):
        text = thread.engine.tokenizer.decode(tokens)
        assert set(text[:3]) <= {"a", "b"}
        assert text[3:] == str(number)
    assert isinstance(refused, InvalidRequest)
    assert refused.param == "structured_outputs"


def test_forms_after_the_end_are_told_so(tiny: Tiny) -> None:
    """A request that needs compiling, when the engine has ended, gets EngineDead as others do."""
    thread = EngineThread(llm_on(tiny[0]).engine)
    thread.start()
    thread.shutdown(10)
    with pytest.raises(EngineDead):
        asyncio.run(collect(thread, [1], SamplingParams(structured_outputs=form(1))))


def test_who_falls_behind_gets_several_steps_at_once(thread: EngineThread, tiny: Tiny) -> None:
    """A consumer whose loop is held up: one delta has all that came meanwhile, for each of n sequences, and
    the whole is what a consumer that keeps up sees."""
    want = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=20, ignore_eos=True, logprobs=2)

    async def read(held_up: bool) -> tuple[int, list[tuple[list[int], str, Any, str | None]]]:
        count, whole = 0, [([], "", [], None)] * 3
        async for delta in thread.stream([4, 5, 6], want):
            count += 1
            for one in delta.deltas:
                ids, text, logprobs, _ = whole[one.index]
                whole[one.index] = (
                    ids + one.token_ids, text + one.text, logprobs + (one.logprobs or []), one.finish_reason
                )  # fmt: skip
            while held_up and thread.engine.has_work:
                time.sleep(0.001)  # the loop itself: nothing else on it runs either
        return count, whole

    async def main() -> None:
        behind, slow = await read(True)
        keep_in_step(thread)
        prompt, quick = await read(False)
        assert slow == quick
        assert [len(ids) for ids, *_ in slow] == [20] * 3
        assert behind <= 3  # the first one or two, and all the rest
        assert prompt >= 20

    asyncio.run(main())


def test_who_does_not_read_along_gets_many_steps_at_once(thread: EngineThread) -> None:
    """Where nobody reads as tokens come, a delta has those of KEPT_STEPS steps, the last one the rest; all in
    all they say what a reader is told, for each of n sequences."""
    count = 2 * KEPT_STEPS + 3
    want = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=count, ignore_eos=True, logprobs=2)

    async def read(interactive: bool) -> list[RequestDelta]:
        return [delta async for delta in thread.stream([4, 5, 6], want, Origin(interactive=interactive))]

    def whole(deltas: list[RequestDelta]) -> list[tuple[list[int], str, list[Any], str | None]]:
        first, *others = deltas
        for other in others:
            first.add(other)
        ordered = sorted(first.deltas, key=lambda one: one.index)
        return [(one.token_ids, one.text, one.logprobs or [], one.finish_reason) for one in ordered]

    kept, read_along = asyncio.run(read(False)), asyncio.run(read(True))
    sizes = [{len(one.token_ids) for one in delta.deltas} for delta in kept]
    assert all(len(size) == 1 and size.pop() % KEPT_STEPS == 0 for size in sizes[:-1])
    assert len(kept) <= 3  # fewer where this loop fell behind
    assert [delta.finished for delta in kept] == [False] * (len(kept) - 1) + [True]
    together = whole(kept)
    assert together == whole(read_along)
    assert [len(ids) for ids, *_ in together] == [count] * 3


def test_what_was_kept_comes_before_an_error() -> None:
    """A step fails while deltas are kept: they are delivered, then the error, and nothing is left behind."""

    def gained(token: int) -> RequestDelta:
        return RequestDelta(7, [SequenceDelta(0, [token])], False, 3)

    async def main() -> None:
        stream = _Stream(asyncio.get_running_loop(), eager=False)
        assert stream.due(gained(1)) == stream.due(gained(2)) == []
        error = RequestDelta(7, [], True, 3, error=StepFailed("boom"))
        kept, last = stream.due(error)
        assert kept.deltas[0].token_ids == [1, 2]
        assert last is error
        assert stream.kept is None
        assert stream.due(error) == [error]

    asyncio.run(main())


def test_an_error_comes_after_what_was_gained_before() -> None:
    """Deltas that wait together with an error: first what was gained, then the error."""

    async def main() -> None:
        stream = _Stream(asyncio.get_running_loop())
        for token in (1, 2):
            stream.queue.put_nowait(RequestDelta(7, [SequenceDelta(0, [token])], False, 3))
        stream.queue.put_nowait(EngineDead("it ended"))
        first = await stream.get()
        assert isinstance(first, RequestDelta)
        assert first.deltas[0].token_ids == [1, 2]
        assert isinstance(await stream.get(), EngineDead)

    asyncio.run(main())
