"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from octavo.engine.logprobs import TokenLogprobs
from octavo.server.body import read_request
from octavo.server.call import Call
from octavo.server.caller import Caller
from octavo.server.choices import Body, CompletionChoice
from octavo.server.context import ServerContext
from octavo.server.logprobs import prompt_logprobs
from octavo.server.prompts import Prompt, read_prompts
from octavo.server.schemas import CompletionRequest

router = APIRouter()


@router.post("/v1/completions", response_model=None)
async def create_completion(request: Request) -> Response:
    """Continue one prompt or a batch of them."""
    context: ServerContext = request.app.state.context
    body = await read_request(request, context, CompletionRequest)
    context.check(body.model)
    # A prompt may be a million token ids to look at, and a form megabytes.
    caller = Caller.of(request)
    call = await context.off_loop_for(caller.body_bytes, quick=True)(_understand, context, body, caller)
    answer: Response = await call.respond(request)
    return answer


def _understand(context: ServerContext, body: CompletionRequest, caller: Caller) -> CompletionCall:
    prompts = read_prompts(body.prompt, context.engine.engine.vocab_size)
    return CompletionCall(context, body, prompts, caller)


class CompletionCall(Call):
    """Choices of prompt i are numbered i * n to i * n + n - 1."""

    id_prefix = "cmpl"
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self, context: ServerContext, request: CompletionRequest, prompts: list[Prompt], caller: Caller
    ) -> None:
        super().__init__(context, request, len(prompts), caller)
        self._asked = request
        self._prompts = prompts

    @property
    def encoded(self) -> bool:
        return not any(isinstance(prompt, str) for prompt in self._prompts)

    def encode(self) -> list[list[int]]:
        special = self._asked.add_special_tokens
        return [
            self._tokenizer.encode(prompt, add_special_tokens=special) if isinstance(prompt, str) else prompt
            for prompt in self._prompts
        ]

    def prompt_texts(self) -> list[Any]:
        return list(self._prompts)

    def new_choice(self, index: int) -> CompletionChoice:
        at = index // self._params.n
        echo, with_logprobs = self._asked.echo, self._asked.logprobs is not None
        return CompletionChoice(
            self._tokenizer,
            index,
            with_logprobs=with_logprobs,
            with_ids=self._asked.return_token_ids,
            echo=self._echo(at) if echo else "",
            scores=self._shown_scores(at) if echo and with_logprobs else (),
            extras=self._choice_extras(at),
        )

    def _echo(self, at: int) -> str:
        prompt = self._prompts[at]
        if isinstance(prompt, str) and self._params.truncate_prompt_tokens is None:
            return prompt
        return self._tokenizer.decode(self._ids[at])  # the tokens that were kept

    def _shown_scores(self, at: int) -> list[TokenLogprobs | int]:
        wanted = self._asked.logprobs or 0
        shown: list[TokenLogprobs | int] = []
        for token_id, entry in zip(self._ids[at], self._scores[at], strict=True):
            shown.append(token_id if entry is None else entry._replace(top=entry.top[:wanted]))
        return shown

    def _choice_extras(self, at: int) -> Body:
        extras: Body = {}
        if self._asked.return_token_ids:
            extras["prompt_token_ids"] = self._ids[at]
        wanted = self._asked.prompt_logprobs
        if wanted is not None:
            entries = [entry and entry._replace(top=entry.top[:wanted]) for entry in self._scores[at]]
            extras["prompt_logprobs"] = prompt_logprobs(self._tokenizer, entries)
        return extras
