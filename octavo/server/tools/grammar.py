"""What a model may write where a tool is strict: plain text, or calls whose arguments follow the schemas.

    hermes   ( ... <tool_call>{"name": "f", "arguments": {...}}</tool_call> )* ...
    llama    {"name": "f", "parameters": {...}}; {...}       or text that does not begin with a brace

As a Lark grammar of llguidance. Text is free up to the opening tag, which is lazy: where it stands a call has
begun, and only one of a declared tool can follow. Arguments of tools that are not strict are any JSON object.
"""

from __future__ import annotations

from octavo.engine.grammar import json_rule
from octavo.server.tools.declare import Tools

_FREE = {"type": "object"}
_START = {
    "hermes": r"""
start: (opened call CLOSE)* TEXT
opened[lazy]: TEXT "<tool_call>"
CLOSE: "</tool_call>"
TEXT: /(?s:.*)/
""",
    # A text that begins with a brace could become a call at any later point, so it has to be one.
    "llama": r"""
start: call (";" call)* | TEXT
TEXT: /(?s:[ \t\r\n]*([^ \t\r\n{].*)?)/
""",
}
_ARGUMENTS = {"hermes": "arguments", "llama": "parameters"}


def write_grammar(tools: Tools, form: str) -> str:
    """The grammar of an answer, for the form hermes or llama."""
    rules = ["%llguidance {}", _START[form].strip()]
    rules.append(f"call: GAP? ({' | '.join(f'call_{i}' for i in range(len(tools.names)))}) GAP?")
    for i, name in enumerate(tools.names):
        schema = tools.parameters(name) if tools.strict(name) else _FREE
        begin = [r'"{"', r'"\"name\""', '":"', rf'"\"{name}\""', '","', rf'"\"{_ARGUMENTS[form]}\""', '":"']
        rules.append(f"call_{i}: {' GAP? '.join(begin)} GAP? {json_rule(schema)} GAP? " + '"}"')
    return "\n".join([*rules, r"GAP: /[ \t\r\n]{1,8}/"]) + "\n"
