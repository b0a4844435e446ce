"""Tokenizer parts from GGUF metadata.

    tokenizer.ggml.model = gpt2    byte-level BPE: tokens + merges, split as tokenizer.ggml.pre says
    tokenizer.ggml.model = llama   SentencePiece BPE: merges follow from the scores, bytes as fallback
    tokenizer.ggml.token_type      1 normal · 2 unknown · 3 control · 4 user-defined · 5 unused · 6 byte

Owns the splits by `pre` name: each is what the tokenizer.json of those models has. A name that is
not listed is refused, since a wrong split gives other ids without an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from octavo.models.errors import TokenizerError, UnsupportedModel
from octavo.models.gguf_file import GgufFile
from octavo.models.tokenizer_parts import TokenizerParts, added_token, surround

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_NAMED_IDS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_WORD_START = "\u2581"

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True, slots=True)
class _Split:
    """How a `pre` name cuts text before BPE, and what else comes with that family."""

    pre_tokenizer: Callable[[], pre_tokenizers.PreTokenizer]
    nfc: bool = False
    ignore_merges: bool = False  # a word that is a token is not taken apart first
    add_bos: bool = False  # when the file does not say


def _by_regex(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


_GPT2 = _Split(_gpt2)
_SMOLLM = _Split(_single_digits)
_LLAMA3 = _Split(lambda: _by_regex(_LLAMA3_SPLIT), ignore_merges=True, add_bos=True)
_QWEN2 = _Split(lambda: _by_regex(_QWEN2_SPLIT), nfc=True)
_SPLITS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
}


def parts_from_gguf(file: GgufFile) -> TokenizerParts:
    """Build the tokenizer that a GGUF file describes.

    Raises TokenizerError for lists that are missing or do not agree, UnsupportedModel for a
    tokenizer model or split that is not known.
    """
    metadata = _Metadata(file)
    model = metadata.get("model")
    if model == "gpt2":
        backend, add_bos = _byte_level_bpe(metadata)
    elif model == "llama":
        backend, add_bos = _sentencepiece_bpe(metadata), True
    else:
        raise UnsupportedModel(
            f"{file.path}: tokenizer.ggml.model = {model!r} is not supported; supported: gpt2, llama"
        )
    for token, kind in zip(metadata.tokens, metadata.types):
        if kind in (_CONTROL, _UNKNOWN):
            backend.add_special_tokens([added_token(token, special=True)])
        elif kind == _USER_DEFINED:
            backend.add_tokens([added_token(token, special=False)])
    named = metadata.named_tokens()
    surround(
        backend,
        bos=named.get("bos_token") if metadata.get("add_bos_token", add_bos) else None,
        eos=named.get("eos_token") if metadata.get("add_eos_token", False) else None,
    )
    template = file.metadata.get("tokenizer.chat_template")
    return TokenizerParts(backend, named, template if isinstance(template, str) else None)


class _Metadata:
    """`tokenizer.ggml.*`, with the token lists checked against each other."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self.path: Path = file.path
        self.tokens: list[str] = self._list("tokens", str)
        self.types: list[int] = self._list("token_type", int, default=[_NORMAL] * len(self.tokens))
        self.require_length("token_type", self.types)

    def get(self, key: str, default: Any = None) -> Any:
        return self._file.metadata.get(f"tokenizer.ggml.{key}", default)

    def _list(self, key: str, item: type, default: list[Any] | None = None) -> list[Any]:
        value = self.get(key, default)
        if not isinstance(value, list) or not value or not isinstance(value[0], item):
            raise TokenizerError(
                f"{self.path}: tokenizer.ggml.{key} is missing or is no list of {item.__name__}"
            )
        return value

    def merges(self) -> list[tuple[str, str]]:
        pairs = []
        for merge in self._list("merges", str):
            left, space, right = merge.partition(" ")
            if not (left and space and right):
                raise TokenizerError(f"{self.path}: tokenizer.ggml.merges holds {merge!r}, not 'left right'")
            pairs.append((left, right))
        return pairs

    def scores(self) -> list[float]:
        scores = self._list("scores", float)
        self.require_length("scores", scores)
        return scores

    def require_length(self, key: str, values: list[Any]) -> None:
        if len(values) != len(self.tokens):
            raise TokenizerError(
                f"{self.path}: tokenizer.ggml.{key} has {len(values)} entries, "
                f"tokenizer.ggml.tokens has {len(self.tokens)}"
            )

    def named_tokens(self) -> dict[str, str]:
        named = {}
        for name, key in _NAMED_IDS.items():
            token_id = self.get(f"{key}_token_id")
            if token_id is None:
                continue
            if not isinstance(token_id, int) or not 0 <= token_id < len(self.tokens):
                raise TokenizerError(
                    f"{self.path}: tokenizer.ggml.{key}_token_id is {token_id!r}, there are "
                    f"{len(self.tokens)} tokens"
                )
            named[f"{name}_token"] = self.tokens[token_id]
        return named


def _byte_level_bpe(metadata: _Metadata) -> tuple[Backend, bool]:
    name = metadata.get("pre", "default")
    split = _SPLITS.get(name) if isinstance(name, str) else None
    if split is None:
        raise UnsupportedModel(
            f"{metadata.path}: tokenizer.ggml.pre = {name!r} is not supported; supported: "
            f"{', '.join(_SPLITS)}"
        )
    backend = _bpe(metadata, metadata.merges(), ignore_merges=split.ignore_merges)
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = split.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend, split.add_bos


def _sentencepiece_bpe(metadata: _Metadata) -> Backend:
    unknown = metadata.named_tokens().get("unk_token")
    merges = _merges_from_scores(metadata)
    backend = _bpe(metadata, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    prefix = metadata.get("add_space_prefix", True)
    spaces = normalizers.Replace(" ", _WORD_START)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_WORD_START), spaces]) if prefix else spaces
    )
    steps = [decoders.Replace(_WORD_START, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if prefix else []))
    return backend


def _merges_from_scores(metadata: _Metadata) -> list[tuple[str, str]]:
    """Rebuild the merges: every way to make a token from two others, best score first.

    SentencePiece joins the neighbours whose union scores best, which is BPE with that order. Only
    normal tokens are made by merging, so that no text can spell a control token.
    """
    score = {
        token: value
        for token, kind, value in zip(metadata.tokens, metadata.types, metadata.scores())
        if kind == _NORMAL
    }
    merges = [
        (token[:cut], token[cut:])
        for token in score
        for cut in range(1, len(token))
        if token[:cut] in score and token[cut:] in score
    ]
    merges.sort(key=lambda pair: (score[pair[0] + pair[1]], len(pair[0])), reverse=True)
    return merges


def _bpe(metadata: _Metadata, merges: list[tuple[str, str]], **options: Any) -> Backend:
    vocabulary = {token: index for index, token in reversed(list(enumerate(metadata.tokens)))}
    try:
        return Backend(models.BPE(vocab=vocabulary, merges=merges, **options))
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(
            f"{metadata.path}: the tokens and merges do not fit together: {error}"
        ) from error
