"""The OpenAI-compatible HTTP API over a running engine.

app.py          puts the parts together   run.py        uvicorn on a thread, for a process that serves
completions.py  /v1/completions           chat.py       /v1/chat/completions
responses/      /v1/responses             tokenization.py  /tokenize, /detokenize
health.py metrics.py openapi.py           what is asked about the server

call.py         a request for text, from schema to answer or stream; what the routes share
generation.py   many engine streams as one, with usage
choices.py      one choice as it grows    logprobs.py   logprobs in the shapes that clients know
tools/          tools, and calls of them  structured.py the form that an answer must have

body.py         bytes -> JSON -> schema   schemas.py    the fields that are honoured
fields.py       the fields that are refused by name, and the values of them that change nothing
prompts.py      `prompt` in its four forms              messages.py  `messages`
stream.py       server-sent events; a client that leaves cancels the work

context.py      the engine's life, the gate             admission.py how much may be open at once
keys.py auth.py API keys and their limits caller.py     who asks
middleware.py   request ids, access log   logs.py heartbeat.py  how and what is logged
protocol.py     bounds on connections     errors.py     one error body for everything
metrics.py      /metrics                  memory_map.py  / and the stream of frames it draws
replay.py       the same page over a recording; web/ is the page
"""

from octavo.server.app import create_app
from octavo.server.config import ServerConfig

__all__ = ["ServerConfig", "create_app"]
