"""Logprobs in the three shapes that clients know.

completions   {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
chat          {"content": [{"token", "logprob", "bytes", "top_logprobs"}], "refusal": null}
prompt        [null, {"token id": {"logprob", "rank", "decoded_token"}}, ...]      as vLLM has it
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from octavo.engine.logprobs import TokenLogprobs
from octavo.models import Tokenizer

Body = dict[str, Any]


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's text; `bytes:\\xe2\\x96` where it is no whole text by itself, as OpenAI writes it; and
    `token_id:7` for one that has none, as vLLM does."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode() or f"token_id:{token_id}"
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class CompletionLogprobs:
    """Builds the completions' object; `text_offset` counts characters from the choice's first."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def body(self, entries: Iterable[TokenLogprobs | int]) -> Body:
        """The next entries; a bare id is a token that nothing precedes, which has no logprob."""
        made: Body = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in entries:
            token_id = entry if isinstance(entry, int) else entry.token_id
            made["tokens"].append(token_text(self._tokenizer, token_id))
            made["text_offset"].append(self._offset)
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
            if isinstance(entry, int):
                made["token_logprobs"].append(None)
                made["top_logprobs"].append(None)
                continue
            made["token_logprobs"].append(entry.logprob)
            top = {token_text(self._tokenizer, one.token_id): one.logprob for one in entry.top}
            top.setdefault(made["tokens"][-1], entry.logprob)  # the token itself is always among them
            made["top_logprobs"].append(top)
        return made


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> Body:
    """The chat object for these tokens."""
    content = [
        {
            **_chat_token(tokenizer, entry.token_id, entry.logprob),
            "top_logprobs": [_chat_token(tokenizer, one.token_id, one.logprob) for one in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs | None]) -> list[Body | None]:
    """One object a prompt token, by token id; null for the first, which nothing precedes."""
    return [None if entry is None else _prompt_token(tokenizer, entry) for entry in entries]


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> Body:
    return {
        "token": token_text(tokenizer, token_id),
        "logprob": logprob,
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def _prompt_token(tokenizer: Tokenizer, entry: TokenLogprobs) -> Body:
    ranked = [(one.token_id, one.logprob, rank) for rank, one in enumerate(entry.top, 1)]
    if all(token_id != entry.token_id for token_id, _, _ in ranked):
        ranked.append((entry.token_id, entry.logprob, entry.rank))
    return {
        str(token_id): {
            "logprob": logprob,
            "rank": rank,
            "decoded_token": token_text(tokenizer, token_id),
        }
        for token_id, logprob, rank in ranked
    }
