"""langchain-openai: chat, streamed, tools bound and forced, structured output. Arguments: URL, model."""

import sys
from typing import Literal

import pydantic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

url, model = sys.argv[1:]
chat = ChatOpenAI(base_url=f"{url}/v1", api_key="k", model=model, temperature=0, max_completion_tokens=30)
user = HumanMessage("What is a sheet folded three times called?")
made = chat.invoke([user])
assert made.content, made
assert made.usage_metadata["output_tokens"] > 0
said = "".join(chunk.content for chunk in chat.stream([user]))
assert said == made.content, (said, made.content)


@tool
def fold(times: Literal[1, 2, 3]) -> str:
    """Fold a sheet that many times."""
    return "folded"


called = chat.bind_tools([fold], tool_choice="fold").invoke([user])
(call,) = called.tool_calls
assert call["name"] == "fold", called
assert call["args"]["times"] in (1, 2, 3), called
answer = chat.bind_tools([fold]).invoke([user, called, ToolMessage("folded", tool_call_id=call["id"])])
assert answer.response_metadata["finish_reason"] in ("stop", "length", "tool_calls"), answer
merged = None
for chunk in chat.bind_tools([fold], tool_choice="fold").stream([user]):
    merged = chunk if merged is None else merged + chunk
assert merged.tool_calls[0]["args"] == call["args"], merged


class Sheet(pydantic.BaseModel):
    kind: Literal["quarto", "octavo"]


for method in ("json_schema", "function_calling"):
    assert isinstance(chat.with_structured_output(Sheet, method=method).invoke([user]), Sheet), method
text = OpenAI(base_url=f"{url}/v1", api_key="k", model=model, temperature=0, max_tokens=8).invoke("A book is")
assert text
print("ok")
