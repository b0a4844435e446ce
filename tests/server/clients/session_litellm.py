"""litellm: chat, streamed, and with a forced call. Arguments: base URL, model."""

import json
import sys

import litellm

url, model = sys.argv[1:]
common = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "k"}
user = [{"role": "user", "content": "What is a sheet folded four times called?"}]
made = litellm.completion(**common, messages=user, max_tokens=20, temperature=0)
assert made.choices[0].message.content, made
stream = litellm.completion(**common, messages=user, max_tokens=20, temperature=0, stream=True)
said = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
assert said == made.choices[0].message.content, (said, made.choices[0].message.content)
tool = {
    "type": "function",
    "function": {
        "name": "fold",
        "description": "Fold a sheet",
        "parameters": {
            "type": "object",
            "properties": {"times": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["times"],
            "additionalProperties": False,
        },
    },
}
forced = {"type": "function", "function": {"name": "fold"}}
called = litellm.completion(**common, messages=user, tools=[tool], tool_choice=forced, temperature=0)
call = called.choices[0].message.tool_calls[0]
assert 1 <= json.loads(call.function.arguments)["times"] <= 9, call
parts = litellm.completion(
    **common, messages=user, tools=[tool], tool_choice=forced, temperature=0, stream=True
)
arguments = ""
for chunk in parts:
    for piece in chunk.choices[0].delta.tool_calls or []:
        arguments += piece.function.arguments or ""
assert json.loads(arguments) == json.loads(call.function.arguments), arguments
print("ok")
