"""A tiny checkpoint with a tokenizer, transformers' greedy answers, and the comparison with them."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from octavo.attention import AttentionBackend
from octavo.engine import Engine, EngineConfig, EngineThread, RequestOutput
from octavo.engine.llm import LLM
from octavo.engine.outputs import RequestDelta
from octavo.engine.thread import _Stream
from octavo.models import LoadedModel
from octavo.sched.lengths import Lengths
from tests.models.helpers import save, tiny_model

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TIE = 1e-4
"""Where the reference's two best logits lie closer than this, either is right."""


def tiny_checkpoint(directory: Path, **options: Any) -> tuple[Path, Any]:
    """Save a random two-layer Llama with a byte-level tokenizer; returns the folder and the model.

    The logits are 40 wider than the tokenizer, as padded vocabularies are.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    size = tokenizer.get_vocab_size()
    model = tiny_model(vocab_size=size + 40, eos_token_id=vocab["A"], **options)
    save(model, directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "chat_template": TEMPLATE})
    )
    return directory, model


class Reference(NamedTuple):
    """Greedy continuation by transformers, and how far apart its two best logits were at each token."""

    tokens: list[int]
    gaps: list[float]


@torch.no_grad()
def greedy(model: Any, prompt: Sequence[int], count: int) -> Reference:
    """`count` greedy tokens in float32 with transformers' own cache."""
    ids, past = torch.tensor([list(prompt)]), None
    tokens: list[int] = []
    gaps: list[float] = []
    for _ in range(count):
        out = model(ids, past_key_values=past, use_cache=True)
        best = out.logits[0, -1].float().topk(2)
        tokens.append(int(best.indices[0]))
        gaps.append(float(best.values[0] - best.values[1]))
        ids, past = best.indices[:1].view(1, 1), out.past_key_values
    return Reference(tokens, gaps)


def ties(outputs: Sequence[RequestOutput], references: Sequence[Reference]) -> int:
    """Assert equality with the references; returns how many differ, first, at a tie of the reference's."""
    count = 0
    for output, reference in zip(outputs, references, strict=True):
        tokens = output.outputs[0].token_ids
        assert len(tokens) == len(reference.tokens)
        first = next((i for i, (a, b) in enumerate(zip(tokens, reference.tokens)) if a != b), None)
        if first is not None:
            assert reference.gaps[first] < TIE, (
                f"prompt of {len(output.prompt_token_ids)}: token {first} is {tokens[first]}, "
                f"not {reference.tokens[first]} (gap {reference.gaps[first]:.2e})"
            )
            count += 1
    return count


def llm_on(model: LoadedModel, backend: AttentionBackend | None = None, **options: Any) -> LLM:
    """An LLM on a model that is loaded already; the pool is small so that check() is quick."""
    if "kv_memory" not in options:
        options.setdefault("num_blocks", -(-2000 // options.get("block_size", 16)))
    llm = LLM.__new__(LLM)
    llm.engine = Engine(model, EngineConfig(checked=True, **options), backend)
    return llm


def llm_with_draft(model: LoadedModel, draft: LoadedModel, *, price: float = 0.0, **options: Any) -> LLM:
    """An LLM that guesses by `draft`, whose passes are taken to cost `price` of one of the model's."""
    if "kv_memory" not in options:
        options.setdefault("num_blocks", -(-2000 // options.get("block_size", 16)))
    options = {"speculate": 4, **options}
    llm = LLM.__new__(LLM)
    llm.engine = Engine(model, EngineConfig(checked=True, draft_model="draft", **options), draft=draft)
    assert llm.engine.draft is not None
    llm.engine.draft.price = price
    return llm


def keep_in_step(thread: EngineThread) -> None:
    """Have the engine wait after each step until its readers took what is new, or left: a reader gets the
    deltas of each step by themselves, however slow it is."""
    deliver = thread._deliver

    def in_step(deltas: list[RequestDelta]) -> None:
        streams = list(thread._streams.values())
        deliver(deltas)
        arrived = {stream.loop: threading.Event() for stream in streams}
        for loop, event in arrived.items():
            with suppress(RuntimeError):  # closed
                loop.call_soon_threadsafe(event.set)

        def taken(stream: _Stream) -> bool:
            return stream.loop.is_closed() or (arrived[stream.loop].is_set() and stream.queue.empty())

        # A loop that ends may leave what it was called for undone; who leaves says so in the inbox.
        end = time.monotonic() + 60
        while not all(taken(stream) for stream in streams) and thread._inbox.empty():
            assert time.monotonic() < end, "a reader took nothing in 60 s"
            time.sleep(0.0005)

    thread._deliver = in_step  # type: ignore[method-assign]


class Hopeful(Lengths):
    """Expects every branch to end at once."""

    def left(self, done: int, limit: int) -> int:
        return 1


def over_admit(llm: Any) -> Any:
    """Make the scheduler of an LLM or EngineThread admit more than the pool can hold to the end, so that
    preemptions follow."""
    llm.engine.scheduler._admitter._lengths = Hopeful()
    return llm


def idle(llm: LLM) -> None:
    """Nothing runs or waits, nothing is held, every invariant holds."""
    stats = llm.engine.pool.stats()
    assert not llm.engine.has_work
    assert stats.held == 0
    assert stats.free + stats.cached == stats.num_blocks
    assert not llm.engine._live
    llm.engine.pool.check()


WAIT_SECONDS = 60
"""For what is sure to come: far more than a machine that is busy needs."""


class Hold:
    """Stops an engine's thread before a step, the first at which `when()`, until go_on().

    What is asked of the thread meanwhile, such as requests and aborts, it does.
    """

    def __init__(self, thread: EngineThread, when: Callable[[], bool] = lambda: True) -> None:
        self.reached, self._free = threading.Event(), threading.Event()
        self._thread, self._when, self._step = thread, when, thread.engine.step
        thread.engine.step = self._held_step  # type: ignore[method-assign]

    def wait(self) -> None:
        """For the thread to stand still."""
        assert self.reached.wait(WAIT_SECONDS)

    def go_on(self) -> None:
        """Let the thread run freely."""
        self._free.set()

    def _held_step(self) -> list[RequestDelta]:
        inbox = self._thread._inbox
        if not self._free.is_set() and self._when():
            self.reached.set()
            while not self._free.is_set():
                with suppress(queue.Empty):
                    call = inbox.get(timeout=0.01)
                    if call is None:  # the thread is to end
                        inbox.put(None)
                        self._free.set()
                    else:
                        call()
        return self._step() if self._thread.engine.has_work else []
