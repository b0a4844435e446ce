"""Enforces StructuredOutputs with llguidance: which tokens may come next, as a row of booleans.

    compile (once per form, kept) -> Matcher, one per sequence --add(token)--> its next state
    masks: begin(matchers) -> computed on a thread beside the forward pass -> bool [rows, V]

A keyword, format or construct that llguidance cannot enforce is refused with its message when the request
is made; nothing is ignored.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper, grammar_from
from llguidance.numpy import (
    allocate_token_bitmask,
    fill_next_token_bitmask_par,
    fill_next_token_bitmask_par_with_draft_tokens,
)

from octavo.engine.schema import exact_formats
from octavo.engine.structured import StructuredOutputs
from octavo.errors import InvalidRequest
from octavo.models import Tokenizer

Masks = npt.NDArray[np.bool_]
_KEPT = 128  # compiled forms
# Bounded, so that a model cannot pad for ever; wide enough for a pretty-printed document.
_JSON = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,24}", "lenient": False, "coerce_one_of": False}


class _Vocabulary:
    """The tokenizer as llguidance wants it."""

    def __init__(self, tokenizer: Tokenizer, size: int, eos: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token) for token in range(size)]
        self.special_token_ids = sorted(tokenizer.special_ids)

    def __call__(self, text: str | bytes) -> list[int]:
        text = text if isinstance(text, str) else text.decode("utf-8", "replace")
        return self._tokenizer.encode(text, add_special_tokens=False)


class Grammars:
    """Compiled forms for one model. compile() may be called from any thread, masks from one.

    Raises InvalidRequest for what the model or llguidance cannot do.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        if not eos_ids:
            raise InvalidRequest(
                "structured_outputs needs a model with an end-of-text token; this one has none",
                param="structured_outputs",
            )
        eos = sorted(eos_ids)
        vocabulary = _Vocabulary(tokenizer, vocab_size, eos[0])
        self._vocab_size = vocab_size
        self._tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=vocab_size, eos_token=eos)
        self._compiled: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._executor = LLExecutor()
        self._thread = ThreadPoolExecutor(1, "octavo-masks")

    def compile(self, form: StructuredOutputs) -> LLMatcher:
        """A matcher at the beginning of a text of this form. Up to seconds for the first of a huge form,
        then O(its state). Raises InvalidRequest with llguidance's message."""
        with self._lock:
            found = self._compiled.get(form.key)
            if found is not None:
                self._compiled.move_to_end(form.key)
                return found.deep_copy()
        made = self._compile(*form.key)
        with self._lock:
            self._compiled[form.key] = made
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
            return made.deep_copy()

    def begin(self, wanted: Sequence[tuple[LLMatcher, Sequence[int]]]) -> Future[Masks]:
        """Start on the masks of each matcher: a row for its next token, and one after each of the guesses
        that go with it. The matchers must be left alone until the result is there."""
        return self._thread.submit(self._masks, wanted)

    def _masks(self, wanted: Sequence[tuple[LLMatcher, Sequence[int]]]) -> Masks:
        starts = np.cumsum([0] + [1 + len(draft) for _, draft in wanted]).tolist()
        packed = allocate_token_bitmask(starts[-1], self._vocab_size)
        jobs = [(m, start, list(draft)) for (m, draft), start in zip(wanted, starts)]
        plain = [(m, start) for m, start, draft in jobs if not draft]
        guessing = [job for job in jobs if job[2]]
        if plain:
            fill_next_token_bitmask_par(self._executor, plain, packed)
        if guessing:  # the library refuses empty lists of guesses here
            fill_next_token_bitmask_par_with_draft_tokens(self._executor, guessing, packed)
        bits = np.unpackbits(packed.view(np.uint8), axis=1, bitorder="little", count=self._vocab_size)
        return bits.view(np.bool_)

    def _compile(self, kind: str, text: str) -> LLMatcher:
        try:
            if kind in ("json", "json_object"):
                schema = json.dumps(exact_formats(json.loads(text)))
                source = LLMatcher.grammar_from_json_schema(schema, overrides=_JSON)  # type: ignore[arg-type]
            elif kind == "grammar":
                source = grammar_from("grammar", text)
            else:
                source = grammar_from("regex" if kind == "regex" else "choice", text)
        except ValueError as error:
            if isinstance(error, InvalidRequest):
                raise
            raise _refused(kind, str(error)) from None
        wrong, messages = LLMatcher.validate_grammar_with_warnings(source, self._tokenizer)
        if wrong or messages:
            raise _refused(kind, "; ".join(messages))
        matcher = LLMatcher(self._tokenizer, source, log_level=0)
        if matcher.is_error():
            raise _refused(kind, matcher.get_error())
        return matcher


def json_rule(schema: Mapping[str, Any]) -> str:
    """A JSON schema as part of a Lark grammar, enforced as one that is given by itself is."""
    return "%json " + json.dumps({**exact_formats(schema), "x-guidance": _JSON})


def _refused(kind: str, why: str) -> InvalidRequest:
    return InvalidRequest(
        f"structured_outputs.{kind} cannot be enforced: {why.strip():.500}", param="structured_outputs"
    )
