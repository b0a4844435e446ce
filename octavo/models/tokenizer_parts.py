"""What tokenizer_hf.py and tokenizer_gguf.py hand to the Tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """A checkpoint's tokenizer, ready to encode.

    `named_tokens` maps bos_token, eos_token and the like to their text; chat templates see them.
    """

    backend: Backend
    named_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_template: str | None = None


def added_token(content: str, *, special: bool) -> AddedToken:
    """Make an added token that matches exactly its text."""
    return AddedToken(content, special=special, normalized=False)


def surround(backend: Backend, bos: str | None, eos: str | None) -> None:
    """Make `backend` put these tokens around a text when special tokens are asked for.

    A token that the vocabulary lacks is left out: the model has no row for it.
    """
    ids = {token: backend.token_to_id(token) for token in (bos, eos) if token is not None}
    known = [(token, token_id) for token, token_id in ids.items() if token_id is not None]
    pieces = ["$A:0"]
    if bos is not None and ids[bos] is not None:
        pieces.insert(0, f"{bos}:0")
    if eos is not None and ids[eos] is not None:
        pieces.append(f"{eos}:0")
    # As a list, not one string: the text of a token may hold spaces.
    backend.post_processor = TemplateProcessing(single=pieces, special_tokens=known)
