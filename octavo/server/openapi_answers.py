"""The schemas of answers, as GET /openapi.json describes them."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]
ERROR_STATUSES = ("400", "401", "404", "408", "413", "415", "429", "500", "503", "504")

_STRING: Json = {"type": "string"}
_COUNT: Json = {"type": "integer", "minimum": 0}
_NULLABLE: Json = {"type": ["string", "null"]}


def _object(properties: Json, *, optional: tuple[str, ...] = (), more: bool = False) -> Json:
    """An object whose properties are all there but the optional ones."""
    required = [name for name in properties if name not in optional]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": more,
    }


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


_USAGE = _object(
    {
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": _object({"cached_tokens": _COUNT}),
    }
)
_TOKEN_IDS: Json = {"token_ids": _list(_COUNT)}
_OF_PROMPT: Json = {
    "prompt_token_ids": _list(_COUNT),
    "prompt_logprobs": _list({"type": ["object", "null"]}),
}
_TOOL_CALL = _object(
    {
        "id": _STRING,
        "type": {"const": "function"},
        "function": _object({"name": _STRING, "arguments": _STRING}),
    }
)


def _body(kind: str, choice: Json, usage: Json, more: Json) -> Json:
    """The properties of a whole answer, or of a chunk."""
    return {
        "id": _STRING,
        "object": {"const": kind},
        "created": _COUNT,
        "model": _STRING,
        "choices": _list(choice),
        "usage": usage,
        **more,
    }


def _answer(kind: str, choice: Json, **more: Json) -> Json:
    return _object(_body(kind, choice, _USAGE, more), optional=tuple(more))


def _chunks(kind: str, choice: Json, **more: Json) -> Json:
    """The events of a stream: chunks, or an error as the last; then DONE."""
    usage = {"anyOf": [_USAGE, {"type": "null"}]}
    chunk = _object(_body(kind, choice, usage, more), optional=("usage", *more))
    error = _object({"error": {"type": "object"}})
    return {"anyOf": [_event({"const": "[DONE]"}), _event(_json({"anyOf": [chunk, error]}))]}


def _json(schema: Json) -> Json:
    """A string that holds JSON of this schema."""
    return {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}


def _event(data: Json, **more: Json) -> Json:
    return _object({"data": data, **more})


def _choice(ended: bool, said: Json, **optional: Json) -> Json:
    """What a choice says, and how it ended: of a whole answer, where it has, or of a chunk, where it may."""
    reasons = ["stop", "length", "tool_calls", *([] if ended else [None])]
    properties = {
        "index": _COUNT,
        **said,
        "logprobs": {"type": ["object", "null"]},
        "finish_reason": {"enum": reasons},
        "stop_reason": {"type": ["string", "integer", "null"]},
    }
    return _object({**properties, **optional}, optional=tuple(optional))


def _completion(ended: bool) -> Json:
    return _choice(ended, {"text": _STRING}, **_TOKEN_IDS, **_OF_PROMPT)


_MESSAGE = _object(
    {
        "role": {"const": "assistant"},
        "content": _NULLABLE,
        "refusal": {"type": "null"},
        "tool_calls": _list(_TOOL_CALL),
    },
    optional=("tool_calls",),
)
_OF_CHAT: Json = {"service_tier": {"const": "default"}, **_OF_PROMPT}
_MODEL = _object(
    {
        "id": _STRING,
        "object": {"const": "model"},
        "created": _COUNT,
        "owned_by": _STRING,
        "max_model_len": _COUNT,
    }
)
ANSWERS: dict[str, Json] = {
    "Completion": _answer("text_completion", _completion(ended=True)),
    "ChatCompletion": _answer(
        "chat.completion", _choice(True, {"message": _MESSAGE}, **_TOKEN_IDS), **_OF_CHAT
    ),
    "Response": _object(
        {
            "id": _STRING,
            "object": {"const": "response"},
            "created_at": _COUNT,
            "status": {"enum": ["completed", "incomplete"]},
            "model": _STRING,
            "output": _list({"type": "object"}),
            "usage": {"type": "object"},
        },
        more=True,
    ),
    "Tokens": _object(
        {"count": _COUNT, "max_model_len": _COUNT, "tokens": _list(_COUNT), "token_strs": _list(_STRING)},
        optional=("token_strs",),
    ),
    "Text": _object({"prompt": _STRING}),
    "Model": _MODEL,
    "Models": _object({"object": {"const": "list"}, "data": _list(_MODEL)}),
    "Health": _object({"status": {"const": "ok"}}, more=True),
    "Metrics": _STRING,
    "Document": {"type": "object"},
    "Error": _object(
        {"error": _object({"message": _STRING, "type": _STRING, "param": _NULLABLE, "code": _NULLABLE})}
    ),
}

_DELTA = _object(
    {
        "role": {"const": "assistant"},
        "content": _STRING,
        "tool_calls": _list(
            _object(
                {
                    "index": _COUNT,
                    "id": _STRING,
                    "type": {"const": "function"},
                    "function": _object({"name": _STRING, "arguments": _STRING}, optional=("name",)),
                },
                optional=("id", "type"),
            )
        ),
    },
    optional=("role", "content", "tool_calls"),
)
STREAMS: dict[str, Json] = {
    "Completion": _chunks("text_completion", _completion(ended=False)),
    "ChatCompletion": _chunks(
        "chat.completion.chunk", _choice(False, {"delta": _DELTA}, **_TOKEN_IDS), **_OF_CHAT
    ),
    "Response": _event(
        _json(_object({"type": _STRING, "sequence_number": _COUNT}, more=True)),
        event=_STRING,
    ),
}
"""Each event of a stream, by the answer that it would be otherwise. OpenAPI 3.1 has no word for it: as is the
custom, the schema of text/event-stream is that of one event."""
