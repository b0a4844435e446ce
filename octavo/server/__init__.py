"""The OpenAI-compatible HTTP API over a running engine.

app.py          routes that are about the server: models, health; puts the parts together
completions.py  /v1/completions           chat.py      /v1/chat/completions
schemas.py      the fields that are honoured
fields.py       the fields that are refused by name, and the values of them that change nothing
prompts.py      `prompt` in its four forms            messages.py  `messages`
generation.py   many engine streams as one, with usage; the same for both routes
stream.py       server-sent events; a client that leaves cancels the work
body.py         bytes -> JSON -> schema   auth.py      the API key
admission.py    how much may be open at once          errors.py    one error body for everything
"""

from octavo.server.app import create_app
from octavo.server.config import ServerConfig

__all__ = ["ServerConfig", "create_app"]
