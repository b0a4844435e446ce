"""Offline use: a list of prompts in, a list of outputs out."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Self, cast

from tqdm import tqdm

from octavo.engine.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.engine.errors import EngineDead, GenerationFailed
from octavo.engine.outputs import CompletionOutput, RequestOutput
from octavo.engine.params import SamplingParams
from octavo.errors import InvalidRequest
from octavo.sched import QueueFull

Prompt = str | Sequence[int]
Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model for offline generation.

    model: smollm2, a Hugging Face directory, a .gguf file or a hub name. The options are those of
    EngineConfig: dtype, block_size, num_blocks or kv_memory, max_num_seqs, max_batched_tokens,
    max_model_len, prefix_caching, host_cache, disk_cache, kv_dtype, threads, speculate, draft_model and
    others. Raises ModelError and ConfigError.
    """

    def __init__(self, model: str = "smollm2", **options: Any) -> None:
        self.engine = Engine.from_config(EngineConfig(model=str(model), **options))

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: Params = None, *, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Complete each prompt (text, or token ids), all at once; outputs in the order of the prompts.

        params: one for all, or one per prompt. Raises InvalidRequest before anything runs if any
        prompt cannot be served, naming its number; GenerationFailed, which carries the outputs of the
        others, if a step failed. Interrupted, it gives every block back.
        """
        texts = _as_list(prompts)
        ids = [self._encode(prompt) for prompt in texts]
        each = _params_for(params, len(ids))
        used = self._check(ids, each)
        outputs = [
            RequestOutput(
                prompt if isinstance(prompt, str) else None, tokens, [CompletionOutput(i) for i in range(p.n)]
            )
            for prompt, tokens, p in zip(texts, used, each, strict=True)
        ]
        by_id: dict[int, int] = {}
        pending = deque(enumerate(zip(ids, each, strict=True)))
        try:
            errors = self._run(pending, by_id, outputs, use_tqdm)
        finally:
            for request_id in by_id:
                self.engine.abort(request_id)
        if errors:
            first = min(errors)
            raise GenerationFailed(
                f"{len(errors)} of {len(ids)} prompts failed; prompt {first}: {errors[first]}",
                [None if number in errors else output for number, output in enumerate(outputs)],
            ) from errors[first]
        return outputs

    def chat(
        self,
        conversations: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        params: Params = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several: lists of {"role", "content"} messages."""
        one = bool(conversations) and isinstance(conversations[0], Mapping)
        each = cast("Sequence[Sequence[Mapping[str, str]]]", [conversations] if one else conversations)
        prompts = [self.engine.tokenizer.encode_chat([dict(message) for message in c]) for c in each]
        return self.generate(prompts, params, use_tqdm=use_tqdm)

    def close(self) -> None:
        """Put what is cached on disk, where there is a disk tier, and release it. `with LLM(...)` does so."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _encode(self, prompt: Prompt) -> list[int]:
        return self.engine.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _check(self, ids: Sequence[Sequence[int]], each: Sequence[SamplingParams]) -> list[list[int]]:
        """The prompts as they will be served, or InvalidRequest that says which cannot be."""
        used = []
        for number, (tokens, params) in enumerate(zip(ids, each, strict=True)):
            try:
                used.append(self.engine.resolve(tokens, params).request.prompt)
            except InvalidRequest as error:
                if len(ids) == 1:
                    raise
                raise type(error)(f"prompt {number}: {error}", param=error.param) from None
        return used

    def _add(
        self, pending: deque[tuple[int, tuple[list[int], SamplingParams]]], by_id: dict[int, int]
    ) -> None:
        """Queue what is pending, as much as max_queue allows now."""
        while pending:
            number, (tokens, params) = pending[0]
            try:
                by_id[self.engine.add_request(tokens, params, interactive=False)] = number
            except QueueFull:
                if not self.engine.has_work:
                    raise
                return
            pending.popleft()

    def _run(
        self,
        pending: deque[tuple[int, tuple[list[int], SamplingParams]]],
        by_id: dict[int, int],
        outputs: list[RequestOutput],
        use_tqdm: bool,
    ) -> dict[int, Exception]:
        """Queue what is pending and step until all has ended; fills `by_id` (request ids to numbers) and
        `outputs`, returns errors by number."""
        errors: dict[int, Exception] = {}
        left = len(pending)
        with tqdm(total=left, desc="generating", unit="prompt", disable=not use_tqdm) as bar:
            while left:
                self._add(pending, by_id)
                if not self.engine.has_work:
                    raise EngineDead(f"{left} requests have not ended, but the engine has nothing to do")
                for delta in self.engine.step():
                    number = by_id.get(delta.request_id)
                    if number is None:
                        continue
                    output = outputs[number]
                    output.num_cached_tokens = delta.num_cached_tokens
                    output.num_guessed, output.num_accepted = delta.num_guessed, delta.num_accepted
                    if delta.prompt_logprobs is not None:
                        output.prompt_logprobs = delta.prompt_logprobs
                    for change in delta.deltas:
                        output.outputs[change.index].add(change)
                    if delta.error is not None:
                        errors[number] = delta.error
                    if delta.finished:
                        left -= 1
                        bar.update()
        return errors


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many: a string, or a list that begins with an int, is one."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [cast("Prompt", prompts)]
    return list(cast("Sequence[Prompt]", prompts))


def _params_for(params: Params, count: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise InvalidRequest(f"{len(params)} sampling parameters for {count} prompts", param="params")
    return list(params)
