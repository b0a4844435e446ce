"""GET /openapi.json: what the server takes and gives, made from the very schemas that check requests.

    pydantic model  -> its fields, types and defaults
    fields.py       -> fields that are refused, with the values of them that are accepted
    PARTS, LIMITS   -> what the types do not say: forms that are read by hand, bounds that the engine checks

Null is allowed everywhere and means "left out"; nothing else that is not described is.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from octavo import __version__
from octavo.engine import params
from octavo.server.context import ServerContext
from octavo.server.errors import JsonResponse
from octavo.server.openapi_answers import ANSWERS, ERROR_STATUSES, STREAMS
from octavo.server.responses.schema import ResponsesRequest
from octavo.server.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, Schema, TokenizeRequest

router = APIRouter()
Json = dict[str, Any]


@router.get("/openapi.json", response_model=None)
async def openapi(request: Request) -> Response:
    """This document."""
    return JsonResponse(document(request.app.state.context))


def document(context: ServerContext) -> Json:
    """The OpenAPI 3.1 document of a server."""
    components: Json = {"schemas": dict(ANSWERS)}
    for schema, _ in _POSTS.values():
        made = components["schemas"][schema.__name__] = request_schema(schema)
        if context.state != "loading":
            made["properties"]["model"] = {"enum": [context.model_name, None]}
    paths: Json = {path: {"post": _post(path, *about)} for path, about in _POSTS.items()}
    for path, about in _GETS.items():
        paths[path] = {"get": _get(path, *about)}
    answer: Json = {
        "openapi": "3.1.0",
        "info": {
            "title": "Octavo",
            "version": __version__,
            "description": "An OpenAI-compatible API over one model. docs/server.md says more.",
        },
        "paths": paths,
        "components": components,
    }
    if context.config.keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        answer["security"] = [{"key": []}]
        for path in ("/health", "/health/live", "/health/ready"):
            paths[path]["get"]["security"] = []
    return answer


def request_schema(schema: type[Schema]) -> Json:
    """The JSON schema of a request body."""
    properties = schema.model_json_schema(ref_template="#/components/schemas/{model}")["properties"]
    made = {}
    for name, field in properties.items():
        part = PARTS.get((schema.__name__, name), PARTS.get(name))
        described = dict(part) if part is not None else _bounded(field, LIMITS.get(name, {}))
        described.pop("title", None)
        described.pop("default", None)
        made[name] = described if _takes_null(described) else {"anyOf": [described, {"type": "null"}]}
    for name, accepted in schema.refusals.items():
        made[name] = {
            "enum": [*accepted, None],
            "description": "Not supported; these values ask for nothing.",
        }
    required = REQUIRED.get(schema.__name__, [])
    return {"type": "object", "properties": made, "required": required, "additionalProperties": False}


def _bounded(field: Json, limits: Json) -> Json:
    """`limits` on the field, or on the part of it that is not null."""
    if not _takes_null(field):
        return {**field, **limits}
    return {
        **field,
        "anyOf": [one if one == {"type": "null"} else {**one, **limits} for one in field["anyOf"]],
    }


def _takes_null(field: Json) -> bool:
    return {"type": "null"} in field.get("anyOf", ())


def _post(path: str, schema: type[Schema], answer: str) -> Json:
    ok: Json = {"application/json": {"schema": {"$ref": f"#/components/schemas/{answer}"}}}
    if "stream" in schema.model_fields:
        ok["text/event-stream"] = {"schema": {"description": "Where stream is true.", **STREAMS[answer]}}
    body = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema.__name__}"}}}
    return {
        "operationId": path.strip("/").replace("/", "_"),
        "summary": (schema.__doc__ or "").split("\n")[0],
        "requestBody": {"required": True, "content": body},
        "responses": {"200": {"description": "The answer.", "content": ok}, **_errors(*ERROR_STATUSES)},
    }


def _get(path: str, answer: str, summary: str) -> Json:
    kind = "text/plain; version=0.0.4; charset=utf-8" if path == "/metrics" else "application/json"
    made: Json = {
        "operationId": path.strip("/").replace("/", "_").replace("{name}", "one"),
        "summary": summary,
        "responses": {
            "200": {
                "description": "The answer.",
                "content": {kind: {"schema": {"$ref": f"#/components/schemas/{answer}"}}},
            },
            **_errors("400", "401", "404", "503"),
        },
    }
    if path == "/v1/models/{name}":
        made["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    if path == "/metrics":
        made["parameters"] = [{"name": "prefix", "in": "query", "schema": {"type": "string"}}]
    return made


def _errors(*statuses: str) -> Json:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {status: {"description": "Refused or failed.", "content": content} for status in statuses}


_POSTS: dict[str, tuple[type[Schema], str]] = {
    "/v1/completions": (CompletionRequest, "Completion"),
    "/v1/chat/completions": (ChatRequest, "ChatCompletion"),
    "/v1/responses": (ResponsesRequest, "Response"),
    "/tokenize": (TokenizeRequest, "Tokens"),
    "/detokenize": (DetokenizeRequest, "Text"),
}
_GETS = {
    "/v1/models": ("Models", "The one model that is served."),
    "/v1/models/{name}": ("Model", "The served model by its name."),
    "/health": ("Health", "Whether requests are taken, with counts of sequences and blocks."),
    "/health/ready": ("Health", "Whether requests are taken."),
    "/health/live": ("Health", "Whether the process is worth keeping."),
    "/metrics": ("Metrics", "Metrics in Prometheus' text format."),
    "/openapi.json": ("Document", "This document."),
}

_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_CONTENT = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                "required": ["type", "text"],
            },
        },
    ]
}
_MESSAGES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {
            "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
            "content": {"anyOf": [_CONTENT, {"type": "null"}]},
            "tool_calls": {"type": ["array", "null"], "items": {"type": "object"}},
            "tool_call_id": {"type": ["string", "null"]},
            "name": {"type": ["string", "null"], "description": "Of a tool's message only."},
        },
        "required": ["role"],
    },
}
_NAME = {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"}
_FUNCTION = {"name": _NAME, "description": {"type": "string"}, "parameters": {"type": "object"}}
_TOOLS = {
    "type": "array",
    "maxItems": 128,
    "items": {
        "type": "object",
        "properties": {
            "type": {"const": "function"},
            "function": {"type": "object", "properties": _FUNCTION, "required": ["name"]},
        },
        "required": ["type", "function"],
    },
}
_FLAT_TOOLS = {
    "type": "array",
    "maxItems": 128,
    "items": {
        "type": "object",
        "properties": {"type": {"const": "function"}, **_FUNCTION},
        "required": ["type", "name"],
    },
}
_STREAM_OPTIONS = {
    "type": "object",
    "properties": {
        "include_usage": {"type": "boolean"},
        "continuous_usage_stats": {"type": "boolean"},
        "include_obfuscation": {"const": False},
    },
    "additionalProperties": False,
}
PARTS: dict[Any, Json] = {
    ("CompletionRequest", "prompt"): {
        "anyOf": [
            _TEXT,
            {"type": "array", "minItems": 1, "items": _TEXT},
            _IDS,
            {"type": "array", "minItems": 1, "items": _IDS},
        ]
    },
    "response_format": {
        "type": "object",
        "properties": {
            "type": {"enum": ["text", "json_object", "json_schema"]},
            "json_schema": {"type": "object", "properties": {"schema": {"type": "object"}}},
        },
        "required": ["type"],
    },
    "structured_outputs": {
        "type": "object",
        "properties": {
            "json": {"type": ["object", "string", "boolean", "null"]},
            "json_object": {"type": "boolean"},
            "regex": {"type": ["string", "null"]},
            "choice": {"type": ["array", "null"], "items": _TEXT},
            "grammar": {"type": ["string", "null"]},
        },
        "additionalProperties": False,
    },
    "messages": _MESSAGES,
    "tools": _TOOLS,
    ("ResponsesRequest", "tools"): _FLAT_TOOLS,
    "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}]},
    "input": {"anyOf": [_TEXT, {"type": "array", "minItems": 1, "items": {"type": "object"}}]},
    "tokens": {"type": "array", "items": {"type": "integer", "minimum": 0}},
    "stop": {"anyOf": [_TEXT, {"type": "array", "maxItems": 16, "items": _TEXT}]},
    "stream_options": _STREAM_OPTIONS,
    ("ResponsesRequest", "stream_options"): {
        "type": "object",
        "properties": {"include_obfuscation": {"const": False}},
        "additionalProperties": False,
    },
}
"""Forms of fields that are read by hand, by name, or by schema and name."""

LIMITS: dict[str, Json] = {
    "temperature": {"minimum": 0},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": 2**31 - 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "min_tokens": {"minimum": 0, "maximum": 2**31 - 1},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"minimum": 0.01, "maximum": 100},
    "seed": {"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1},
    "bad_words": {"maxItems": params.MAX_BAD_WORDS},
    "logit_bias": {
        "additionalProperties": {"type": "number", "minimum": -params.MAX_BIAS, "maximum": params.MAX_BIAS},
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
    },
    "truncate_prompt_tokens": {"minimum": 1, "maximum": 2**31 - 1},
    "best_of": {"minimum": 1, "maximum": params.MAX_BEST_OF},
    "prompt_logprobs": {"minimum": 0, "maximum": params.MAX_LOGPROBS},
    "top_logprobs": {"minimum": 0, "maximum": params.MAX_LOGPROBS},
}
"""Bounds that SamplingParams checks."""

REQUIRED = {
    "CompletionRequest": ["prompt"],
    "ChatRequest": ["messages"],
    "ResponsesRequest": ["input"],
    "DetokenizeRequest": ["tokens"],
}
