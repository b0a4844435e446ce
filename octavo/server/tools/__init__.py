"""Tools: what a request declares, how a model is told, and calls read back from its text.

declare.py   `tools` and `tool_choice` of a request, checked
prompt.py    which form a model's chat template uses; the description for templates that have none
parse.py     text as it comes -> content and calls, for both forms
grammar.py   what a model may write where calls must follow the tools' schemas
scan.py      one call's JSON as it comes -> its name, then its arguments
"""

from octavo.server.tools.declare import Tools, read_tools
from octavo.server.tools.grammar import write_grammar
from octavo.server.tools.parse import (
    Arguments,
    CallStart,
    Content,
    NamedParser,
    ToolEvent,
    ToolParser,
    make_parser,
)
from octavo.server.tools.prompt import ToolForm, form_of, render_tools

__all__ = [
    "Arguments",
    "CallStart",
    "Content",
    "NamedParser",
    "ToolEvent",
    "ToolForm",
    "ToolParser",
    "Tools",
    "form_of",
    "make_parser",
    "read_tools",
    "render_tools",
    "write_grammar",
]
