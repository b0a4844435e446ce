"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from octavo.server.body import read_request
from octavo.server.call import Body, Call
from octavo.server.caller import Caller
from octavo.server.context import ServerContext
from octavo.server.messages import read_messages
from octavo.server.schemas import ChatRequest

router = APIRouter()


@router.post("/v1/chat/completions", response_model=None)
async def create_chat_completion(request: Request) -> Response:
    """Continue a conversation with the assistant's next message."""
    context: ServerContext = request.app.state.context
    body = await read_request(request, context, ChatRequest)
    context.check(body.model)
    messages = await context.off_loop(read_messages, body.messages)
    return await ChatCall(context, body, messages, Caller.of(request)).respond(request)


class ChatCall(Call):
    """One conversation; its `n` choices are n messages."""

    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self, context: ServerContext, request: ChatRequest, messages: list[dict[str, str]], caller: Caller
    ) -> None:
        super().__init__(context, request, 1, caller)
        self._messages = messages

    def encode(self) -> list[list[int]]:
        tokenizer = self._context.engine.engine.tokenizer
        return [tokenizer.encode_chat(self._messages, add_generation_prompt=True)]

    def prompt_texts(self) -> list[Any]:
        return list(self._messages)

    def whole_choice(self, index: int, text: str) -> Body:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def opening(self, index: int) -> Body | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def chunk_choice(self, index: int, text: str) -> Body:
        return {"delta": {"content": text} if text else {}}
