"""POST /tokenize and POST /detokenize: what the tokens of a text or a conversation are, as vLLM has them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from octavo.errors import InvalidRequest
from octavo.server.body import read_request
from octavo.server.context import ServerContext
from octavo.server.errors import JsonResponse
from octavo.server.logprobs import token_text
from octavo.server.messages import read_messages
from octavo.server.prompts import check_token_ids
from octavo.server.schemas import DetokenizeRequest, TokenizeRequest
from octavo.server.tools import form_of, read_tools, render_tools

router = APIRouter()


@router.post("/tokenize", response_model=None)
async def tokenize(request: Request) -> Response:
    """The token ids of a prompt, or of messages as the chat route would give them to the model."""
    context: ServerContext = request.app.state.context
    body = await read_request(request, context, TokenizeRequest)
    context.check(body.model)
    return JsonResponse(await context.off_loop_for(request.state.body.count)(_tokenize, context, body))


@router.post("/detokenize", response_model=None)
async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    context: ServerContext = request.app.state.context
    body = await read_request(request, context, DetokenizeRequest)
    context.check(body.model)
    return JsonResponse(await context.off_loop_for(request.state.body.count)(_detokenize, context, body))


def _tokenize(context: ServerContext, body: TokenizeRequest) -> dict[str, Any]:
    tokenizer = context.engine.engine.tokenizer
    if body.prompt is not None:
        ids = tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
    else:
        form = form_of(tokenizer.chat_template, context.config.tool_format)
        messages = read_messages(body.messages, form)
        messages, variables = render_tools(form, messages, read_tools(body.tools, None, None))
        variables |= body.chat_template_kwargs
        ids = tokenizer.encode_chat(messages, body.add_generation_prompt, **variables)
    answer = {"count": len(ids), "max_model_len": context.engine.engine.max_model_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [token_text(tokenizer, token_id) for token_id in ids]
    return answer


def _detokenize(context: ServerContext, body: DetokenizeRequest) -> dict[str, Any]:
    engine = context.engine.engine
    if not isinstance(body.tokens, list):
        raise InvalidRequest("tokens must be a list of token ids", param="tokens")
    check_token_ids(body.tokens, engine.vocab_size, "tokens", "tokens")
    text = engine.tokenizer.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)
    return {"prompt": text}
