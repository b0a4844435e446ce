"""A stand-in for the engine thread: scripted text, no model, and switches for every way to fail.

Tokens are bytes. Sequence i of a request says WORDS from the i-th on, one token a word, until
`max_tokens` or the end of the list. Tests watch `running`, `aborted` and `seen`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from octavo.engine.config import EngineConfig
from octavo.engine.errors import EngineDead
from octavo.engine.origin import Origin
from octavo.engine.outputs import RequestDelta, SequenceDelta
from octavo.engine.params import SamplingParams
from octavo.errors import InvalidRequest

WORDS = ["One", " sheet", " makes", " sixteen", " pages", ",", " so", " caf\u00e9", " \U0001f600", "."]


class FakeTokenizer:
    """Bytes as tokens; a chat is rendered as `role: content` lines."""

    chat_template = "{{ tools }} <tool_call>"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode("utf-8", "replace")

    def encode_chat(
        self, messages: list[dict[str, str]], add_generation_prompt: bool = True, **variables: object
    ) -> list[int]:
        self.variables = variables
        if messages[0]["role"] == "assistant":
            raise InvalidRequest("the template says: a chat starts with a user", param="messages")
        text = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        return self.encode(text + ("assistant:" if add_generation_prompt else ""))


class FakeEngine:
    """The attributes that the server and the commands read."""

    tokenizer = FakeTokenizer()
    config = EngineConfig()
    model_name = "fake/model"
    max_model_len = 100
    vocab_size = 256

    def __init__(self) -> None:
        self.observers: list[object] = []

    def resolve(self, prompt: list[int], params: SamplingParams) -> None:
        if not 0 < len(prompt) < self.max_model_len:
            raise InvalidRequest(
                f"the prompt has {len(prompt)} tokens, the context holds {self.max_model_len}", param="prompt"
            )
        for token in params.logit_bias:
            if token >= self.vocab_size:
                raise InvalidRequest(f"logit_bias has token {token}", param="logit_bias")

    def describe(self) -> list[tuple[str, str]]:
        return [("model", self.model_name), ("blocks", "8 of 16 tokens")]


@dataclass
class FakeEngineThread:
    """Streams WORDS; the fields below change how, for the requests that start after."""

    engine: FakeEngine = field(default_factory=FakeEngine)
    alive: bool = True
    step_seconds: float = 0.0
    delay: float = 0.0  # seconds before each token
    stalled: bool = False  # as if queued for ever
    hold_before: int | None = None  # no token from that one on, until this is None again
    hold_prompt: str = ""  # of this prompt only, where it is set
    fail_on: str = ""  # raise for this prompt, at once
    fail_after: int | None = None  # raise after that many tokens
    error_after: int | None = None  # send a delta with an error instead
    end_after: int | None = None  # the stream just ends, not finished
    cached: int = 0
    failure: Exception = field(default_factory=lambda: RuntimeError("secret detail"))
    seen: list[tuple[list[int], SamplingParams]] = field(default_factory=list)
    origins: list[Origin | None] = field(default_factory=list)
    configs: list[object] = field(default_factory=list)  # what a command asked to load
    running: int = 0
    aborted: int = 0
    started: bool = False
    stopped: bool = False

    def start(self) -> None:
        self.started, self.alive, self.stopped = True, True, False

    def shutdown(self, timeout: float | None = None) -> None:
        self.alive, self.stopped = False, True

    def stats(self) -> dict[str, int]:
        return {"num_running": self.running, "num_waiting": 0, "blocks_total": 8, "blocks_free": 8}

    async def stream(
        self, prompt_token_ids: list[int], params: SamplingParams, origin: Origin | None = None
    ) -> AsyncGenerator[RequestDelta, None]:
        self.engine.resolve(prompt_token_ids, params)
        self.seen.append((prompt_token_ids, params))
        self.origins.append(origin)
        self.running += 1
        finished = False
        try:
            if self.fail_on and prompt_token_ids == list(self.fail_on.encode()):
                raise self.failure
            while self.stalled:
                await asyncio.sleep(0.01)
            for step in range(len(WORDS) + params.n):
                await asyncio.sleep(self.delay)
                held = not self.hold_prompt or prompt_token_ids == list(self.hold_prompt.encode())
                while held and step == self.hold_before and not self.stopped:
                    await asyncio.sleep(0.01)
                if self.stopped:
                    raise EngineDead("the engine was shut down")
                delta = self._step(step, params, len(prompt_token_ids))
                finished = delta.finished
                if step == self.end_after:
                    return
                yield delta
                if finished or delta.error:
                    return
        finally:
            self.running -= 1
            self.aborted += not finished

    def _step(self, step: int, params: SamplingParams, num_prompt_tokens: int) -> RequestDelta:
        if step == self.fail_after:
            raise self.failure
        delta = RequestDelta(7, [], False, num_prompt_tokens, self.cached)
        if step == 0 and params.prompt_logprobs is not None:
            delta.prompt_logprobs = [None] * num_prompt_tokens
        if step == self.error_after:
            delta.error = self.failure
            return delta
        limits = [min(len(WORDS) - i, params.max_tokens or 1000) for i in range(params.n)]
        for i, limit in enumerate(limits):
            if step < limit:
                reason = None
                if step == limit - 1:
                    reason = "length" if limit == params.max_tokens else "stop"
                delta.deltas.append(SequenceDelta(i, [65 + step], WORDS[i + step], reason))
        delta.finished = step == max(limits) - 1
        return delta
