"""Text to ids and back, over the `tokenizers` library.

    encode(text)            special-token strings in it are plain text
    encode_chat(messages)   the template's control tokens become control ids, the messages' do not
    decode(ids)             ids that the tokenizer does not know give no text

Two tokenizers share one vocabulary: `_text` spells special tokens out, `_control` maps them to
their ids. Both are set up once and never changed, so calls from many threads may overlap.

Owns the rule on special tokens. Building from files is in tokenizer_hf.py and tokenizer_gguf.py.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from octavo.models.chat import ChatTemplate, Shield
from octavo.models.errors import NoChatTemplate
from octavo.models.gguf_file import GgufFile
from octavo.models.tokenizer_gguf import parts_from_gguf
from octavo.models.tokenizer_hf import parts_from_directory
from octavo.models.tokenizer_parts import TokenizerParts

_WORD_START = "\u2581"  # SentencePiece's visible space
_LONG_TEXT = 4096  # characters; below, the batch call's own cost is more than what it saves


class Tokenizer:
    """Encodes and decodes for one model. Safe to call from several threads at once."""

    def __init__(self, parts: TokenizerParts) -> None:
        """Take over `parts.backend`, which nobody else may change afterwards."""
        self._control = parts.backend
        self._text = _spelling_twin(parts.backend)
        self._named = dict(parts.named_tokens)
        added = self._control.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self.special_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size: int = max(self._control.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.bos_token_id: int | None = self._id_of("bos_token")
        self.eos_token_id: int | None = self._id_of("eos_token")
        first = self._control.encode("x", add_special_tokens=False).tokens[:1]
        self._marks_word_start = _WORD_START in "".join(first)
        self._template: ChatTemplate | None = None
        if parts.chat_template is not None:
            self._template = ChatTemplate(parts.chat_template, self._named)
        special = {self._added[i] for i in self.special_ids}
        written = {
            text
            for text in self._added.values()
            if self._template is not None and self._template.writes(text)
        }
        self._shield = Shield(special, written - special)
        self._single = {text for text in special if len(text) == 1}

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer:
        """Build from tokenizer.json and its companions. Raises TokenizerError."""
        return cls(parts_from_directory(directory))

    @classmethod
    def from_gguf(cls, file: GgufFile) -> Tokenizer:
        """Build from GGUF metadata. Raises TokenizerError or UnsupportedModel."""
        return cls(parts_from_gguf(file))

    @property
    def chat_template(self) -> str | None:
        """The template's source, None when the model has none."""
        return self._template.source if self._template is not None else None

    def encode(self, text: str, add_special_tokens: bool = True, *, allow_control: bool = False) -> list[int]:
        """Encode text. Strings such as `<|im_end|>` in it are text, unless `allow_control`.

        add_special_tokens: put the BOS (and EOS, where the model wants it) around, once.
        """
        if not allow_control:
            return _ids(self._text, text, add_special_tokens)
        ids = _ids(self._control, text, add_special_tokens)
        if self.bos_token_id is not None and ids[:2] == [self.bos_token_id] * 2:
            del ids[0]  # the text brought its own
        return ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[int]:
        """Render messages with the chat template and encode the result.

        Equals transformers' `apply_chat_template(tokenize=True)` for messages without special-token
        strings; where they occur in messages, tools or other variables they are encoded as text.
        Raises NoChatTemplate, or ChatTemplateError when the template refuses or fails.
        """
        template = self._require_template()
        marked, variables, marker = self._shield.mark(messages, template_kwargs, template.source)
        rendered = template.render(marked, add_generation_prompt, variables)
        first, *rest = rendered.split(marker) if marker is not None else [rendered]
        ids = self._encode_piece(first, continued=False)
        for piece in rest:
            ids += self._encode_piece(piece, continued=True)
        return ids

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """Render messages to text, for a person to read. Raises what encode_chat raises."""
        return self._require_template().render(messages, add_generation_prompt, template_kwargs)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Decode ids; those outside the vocabulary (a model's logits may be wider) give no text."""
        known = [token_id for token_id in ids if 0 <= token_id < self.vocab_size]
        return self._control.decode(known, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for: possibly part of a character; empty for an unknown id."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._control.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if token is None:
            return b""
        kind = self._decoder_kind
        if kind == "bytes" and all(character in _byte_of() for character in token):
            return bytes(_byte_of()[character] for character in token)
        if kind == "fallback":
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                return bytes.fromhex(token[3:5])
            return token.replace(_WORD_START, " ").encode()
        return token.encode()

    @functools.cached_property
    def _decoder_kind(self) -> str:
        state = self._control.decoder.__getstate__() if self._control.decoder is not None else b""
        if b'"ByteLevel"' in state:
            return "bytes"
        return "fallback" if b'"ByteFallback"' in state else "plain"

    def _require_template(self) -> ChatTemplate:
        if self._template is None:
            raise NoChatTemplate(
                "this model has no chat template; use plain completions instead", param="messages"
            )
        return self._template

    def _id_of(self, name: str) -> int | None:
        text = self._named.get(name)
        return None if text is None else self._control.token_to_id(text)

    def _encode_piece(self, piece: str, continued: bool) -> list[int]:
        """Encode rendered chat text; `continued` when it is not the beginning."""
        # A special token of one character could not be cut, so it was set apart instead.
        backend = self._text if continued and piece in self._single else self._control
        if continued and self._marks_word_start:
            # SentencePiece would put a space before the piece. Behind a newline it does not.
            newline = _ids(backend, "\n", False)
            ids = _ids(backend, "\n" + piece, False)
            if ids[: len(newline)] == newline:
                return ids[len(newline) :]
        return _ids(backend, piece, False)


def _ids(backend: Backend, text: str, add_special_tokens: bool) -> list[int]:
    """Encode one text. A long one by the batch call, which lets other threads run meanwhile."""
    if len(text) < _LONG_TEXT:
        return backend.encode(text, add_special_tokens=add_special_tokens).ids
    return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def _spelling_twin(backend: Backend) -> Backend:
    """Make a tokenizer over the same model that treats special tokens in its input as text.

    The vocabulary, the bulk of the memory, is shared; a copy is made only when the added tokens
    would come out with other ids.
    """
    added = backend.get_added_tokens_decoder()
    twin = Backend(backend.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if getattr(backend, part) is not None:
            setattr(twin, part, getattr(backend, part))
    for _, token in sorted(added.items()):
        twin.add_special_tokens([token]) if token.special else twin.add_tokens([token])
    if twin.get_added_tokens_decoder() != added:
        twin = Backend.from_str(backend.to_str())
    twin.encode_special_tokens = True
    return twin


@functools.cache
def _byte_of() -> dict[str, int]:
    """Invert GPT-2's map from bytes to printable characters."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    hidden = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(256 + index): byte for index, byte in enumerate(hidden)})
    return table
