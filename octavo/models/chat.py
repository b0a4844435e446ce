"""Chat templates: rendering, and keeping message text from posing as control tokens.

    messages --shield--> messages with a marker inside every control-token literal
             --render--> one string: the template's own control tokens are whole, the messages' are not
             --split at the marker--> pieces that the tokenizer encodes one by one

A literal is cut after its first character, so a template that trims, slices or joins message text
cannot make it whole again. Text without such literals passes untouched, as one piece.

Owns the Jinja environment (the one transformers documents) and the marking. Knows no token ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import chain
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.models.errors import ChatTemplateError

# Private-use code points: no writing system has them, so a free one is always at hand.
_MARKERS = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE))


class ChatTemplate:
    """One compiled template."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """Compile; `variables` (bos_token, eos_token, ...) are visible to the template.

        A syntax error is kept for `render`, so that a model with a broken template still completes.
        """
        self.source = source
        self._variables = dict(variables)
        self._compiled: jinja2.Template | None = None
        self._broken = ""
        environment = _environment()
        try:
            self._compiled = environment.from_string(source)
            self._literals = _literal_text(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            self._broken = f"the model's chat template does not compile: line {error.lineno}: {error.message}"
            self._literals = ""

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        """Render messages. Raises ChatTemplateError with the template's own words when it refuses."""
        if self._compiled is None:
            raise ChatTemplateError(self._broken, param="messages")
        scope = {"tools": None, "documents": None, **self._variables, **variables}
        try:
            return self._compiled.render(
                **scope, messages=list(messages), add_generation_prompt=add_generation_prompt
            )
        except _Refusal as error:
            raise ChatTemplateError(str(error), param="messages") from error
        except Exception as error:  # a template is a program: it can fail in any way on odd messages
            raise ChatTemplateError(
                f"the model's chat template failed on these messages: {type(error).__name__}: {error}",
                param="messages",
            ) from error

    def writes(self, text: str) -> bool:
        """Whether `text` stands literally in the template."""
        return text in self._literals


class Shield:
    """Marks control-token literals inside messages, and finds the marks again in rendered text."""

    def __init__(self, literals: Iterable[str], template_literals: Iterable[str]) -> None:
        """`literals` are marked everywhere; `template_literals` everywhere but in assistant messages.

        The second kind are added tokens that no one declared special although the template writes
        them: turn markers in some models, `<think>` and the like in others. What the assistant said
        before may well contain those, and templates look for them there.
        """
        everywhere = set(literals)
        self._literals = tuple(everywhere | set(template_literals))
        self._everywhere = _start_pattern(everywhere)
        self._all = _start_pattern(set(self._literals))

    def mark(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], taken: str
    ) -> tuple[list[Any], dict[str, Any], str | None]:
        """Return marked messages and variables, and the marker, None when nothing needed one.

        The marker occurs neither in the input nor in `taken`, the template's text. Keys are marked
        like values (a tool's parameter names are the caller's text); names of variables are not.
        """
        text = "".join(chain(_strings(messages), _strings(variables)))
        # Substring search first: the pattern is slow on long text, and nearly all text is innocent.
        if not any(literal in text for literal in self._literals):
            return list(messages), dict(variables), None
        marker = _free_marker(text + taken)
        marked = []
        for message in messages:
            from_model = isinstance(message, Mapping) and message.get("role") == "assistant"
            marked.append(_mark(message, self._everywhere if from_model else self._all, marker))
        return marked, {key: _mark(value, self._all, marker) for key, value in variables.items()}, marker


class _Refusal(jinja2.TemplateError):
    """raise_exception() was called by the template."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here it only has to render."""

    tags = {"generation"}  # noqa: RUF012 - the attribute that jinja2 reads

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which a prompt is not.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    raise _Refusal(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _literal_text(tree: jinja2.nodes.Template) -> str:
    pieces = [node.data for node in tree.find_all(jinja2.nodes.TemplateData)]
    pieces += [node.value for node in tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str)]
    return "\0".join(pieces)  # so that no token is found across two of them


def _start_pattern(literals: set[str]) -> re.Pattern[str] | None:
    """Match one character wherever a literal begins, so that overlapping literals are all cut."""
    if not literals:
        return None
    longest_first = sorted(literals, key=len, reverse=True)
    return re.compile(f"(?=({'|'.join(map(re.escape, longest_first))}))(.)", re.DOTALL)


def _cut(match: re.Match[str], marker: str) -> str:
    """Put the marker behind a literal's first character; around it when there is no second one."""
    return marker + match[2] + marker if len(match[1]) == 1 else match[2] + marker


def _mark(value: Any, pattern: re.Pattern[str] | None, marker: str) -> Any:
    if pattern is None:
        return value
    if isinstance(value, str):
        return pattern.sub(lambda match: _cut(match, marker), value)
    if isinstance(value, Mapping):
        return {_mark(key, pattern, marker): _mark(item, pattern, marker) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mark(item, pattern, marker) for item in value]
    return value


def _strings(value: Any) -> Iterator[str]:
    """Every string in a nest of mappings and lists, each closed by NUL to keep neighbours apart."""
    if isinstance(value, str):
        yield value
        yield "\0"
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


def _free_marker(text: str) -> str:
    used = set(text)
    for code in chain(*_MARKERS):
        if chr(code) not in used:
            return chr(code)
    raise ChatTemplateError("the messages use every private-use character", param="messages")
