"""POST /v1/responses: OpenAI's newer form of chat. Stateless: nothing is stored, so nothing is referred to.

schema.py   the fields, honoured and refused         input.py    `input` -> messages of a chat
call.py     the call: answer, events                 items.py    pieces -> output items and their events
"""

from octavo.server.responses.call import router

__all__ = ["router"]
