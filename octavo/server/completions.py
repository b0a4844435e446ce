"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from octavo.server.body import read_request
from octavo.server.call import Body, Call
from octavo.server.caller import Caller
from octavo.server.context import ServerContext
from octavo.server.prompts import Prompt, read_prompts
from octavo.server.schemas import CompletionRequest

router = APIRouter()


@router.post("/v1/completions", response_model=None)
async def create_completion(request: Request) -> Response:
    """Continue one prompt or a batch of them."""
    context: ServerContext = request.app.state.context
    body = await read_request(request, context, CompletionRequest)
    context.check(body.model)
    # A prompt may be a million token ids to look at.
    prompts = await context.off_loop(read_prompts, body.prompt, context.engine.engine.vocab_size)
    return await CompletionCall(context, body, prompts, Caller.of(request)).respond(request)


class CompletionCall(Call):
    """Choices of prompt i are numbered i * n to i * n + n - 1."""

    id_prefix = "cmpl"
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self, context: ServerContext, request: CompletionRequest, prompts: list[Prompt], caller: Caller
    ) -> None:
        super().__init__(context, request, len(prompts), caller)
        self._prompts = prompts
        self._echo = request.echo
        self._echoes: list[str] = []

    def encode(self) -> list[list[int]]:
        tokenizer = self._context.engine.engine.tokenizer
        if self._echo:
            self._echoes = [
                prompt if isinstance(prompt, str) else tokenizer.decode(prompt) for prompt in self._prompts
            ]
        return [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in self._prompts]

    def prompt_texts(self) -> list[Any]:
        return list(self._prompts)

    def whole_choice(self, index: int, text: str) -> Body:
        return {"text": self._echoed(index) + text}

    def opening(self, index: int) -> Body | None:
        return {"text": self._echoed(index)} if self._echo else None

    def chunk_choice(self, index: int, text: str) -> Body:
        return {"text": text}

    def _echoed(self, index: int) -> str:
        return self._echoes[index // self._params.n] if self._echo else ""
