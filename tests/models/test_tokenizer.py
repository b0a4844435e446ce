"""Encoding and decoding, from directories and from GGUF metadata."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import regex
from transformers import AutoTokenizer

from octavo.models import Tokenizer, TokenizerError, UnsupportedModel
from tests.models.tokenizers_on_disk import (
    byte_level_backend,
    byte_level_metadata,
    gguf_with,
    sentencepiece_metadata,
    user_defined,
    write_directory,
)

STORIES = Path(__file__).parents[3] / "shared" / "models" / "stories260K-hf"
TEXTS = [
    "The quick brown fox",
    "  spaces  and\ttabs\n\nlines",
    "naïve café — 日本語 😀",
    "x=12345; y = 3.14",
    "",
    " ",
]


def test_directory_equals_transformers(tmp_path: Path) -> None:
    """Ids and text are those of transformers' tokenizer for the same directory."""
    directory = write_directory(tmp_path)
    found, wanted = Tokenizer.from_directory(directory), AutoTokenizer.from_pretrained(directory)
    for text in TEXTS:
        ids = found.encode(text)
        assert ids == wanted(text).input_ids
        assert found.decode(ids) == text
    assert found.vocab_size == len(wanted)
    assert found.eos_token_id == wanted.eos_token_id == 0
    assert found.bos_token_id is None


def test_special_strings_in_text_are_text(tmp_path: Path) -> None:
    """`<|end|>` in a text is spelled out and decodes to itself; allow_control makes it one id."""
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path))
    ids = tokenizer.encode("stop<|end|>here")
    assert not tokenizer.special_ids & set(ids)
    assert tokenizer.decode(ids) == "stop<|end|>here"
    assert 0 in tokenizer.encode("stop<|end|>here", allow_control=True)
    assert tokenizer.special_ids == {0, 1}


@pytest.mark.parametrize(
    ("bos", "flags", "wanted"),
    [
        (True, {}, [1]),
        (False, {}, []),
        (False, {"add_bos_token": True}, [1]),
        (True, {"add_bos_token": True}, [1]),
        (True, {"add_bos_token": False}, [1]),
        (False, {"add_bos_token": True, "add_eos_token": True}, [1, 0]),
    ],
)
def test_one_bos(bos: bool, flags: dict[str, bool], wanted: list[int], tmp_path: Path) -> None:
    """BOS comes from the post-processor, or the flags where there is none, once, never from the text."""
    directory = write_directory(tmp_path, bos=bos, bos_token="<|start|>", **flags)
    tokenizer, reference = Tokenizer.from_directory(directory), AutoTokenizer.from_pretrained(directory)
    inner = tokenizer.encode("fox", add_special_tokens=False)
    ids = tokenizer.encode("fox")
    assert [token for token in ids if token in (0, 1)] == wanted
    assert ids == wanted[:1] + inner + wanted[1:]
    if bos:  # with neither, transformers 5 drops the flags
        assert ids == reference("fox").input_ids
    again = tokenizer.encode("<|start|>fox", allow_control=True)
    assert again.count(1) == 1, "a BOS in the text stands for the one that would be added"
    assert tokenizer.encode("<|start|>fox").count(1) == len(wanted[:1])


def test_ids_outside_the_vocabulary_decode_to_nothing(tmp_path: Path) -> None:
    """Logits may be wider than the tokenizer: such ids, and negative ones, give no text."""
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path))
    ids = tokenizer.encode("fox")
    odd = [tokenizer.vocab_size, 10**6, 2**40, -1]
    assert tokenizer.decode(odd) == ""
    assert tokenizer.decode([*odd, *ids, *odd]) == "fox"
    assert all(tokenizer.token_bytes(token) == b"" for token in odd)


def test_decode_may_keep_special_tokens(tmp_path: Path) -> None:
    """skip_special_tokens=False shows them."""
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path))
    ids = [1, *tokenizer.encode("fox"), 0]
    assert tokenizer.decode(ids) == "fox"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|start|>fox<|end|>"


def test_token_bytes_join_to_the_text(tmp_path: Path) -> None:
    """Bytes of the tokens, joined, are the text's UTF-8, also where a character spans tokens."""
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path))
    for text in TEXTS:
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()
    assert tokenizer.token_bytes(0) == b"<|end|>"


def test_tokens_known_only_to_the_config_are_added(tmp_path: Path) -> None:
    """added_tokens_decoder and named tokens count even when tokenizer.json does not flag them."""
    backend = byte_level_backend(control=[])
    size = backend.get_vocab_size()
    added = {str(size): {"content": "<|end|>", "special": True}}
    directory = write_directory(tmp_path, backend, added_tokens_decoder=added, unk_token="fox")
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.eos_token_id == size
    assert tokenizer.special_ids == {size} | {i for i in [backend.token_to_id("fox")] if i is not None}
    assert size not in tokenizer.encode("<|end|>")


def test_missing_and_broken_files_are_typed_errors(tmp_path: Path) -> None:
    """No tokenizer.json, a broken one, and a broken tokenizer_config.json name the file."""
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json.*tokenizer\.model alone is not read"):
        Tokenizer.from_directory(tmp_path)
    write_directory(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: not valid JSON"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: cannot be read"):
        Tokenizer.from_directory(tmp_path)


def test_threads_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Encodes that allow control ids and encodes that do not, from 8 threads, keep their answers."""
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path))
    text = "a<|end|>b The quick"
    wanted = {flag: tokenizer.encode(text, allow_control=flag) for flag in (True, False)}

    def work(index: int) -> bool:
        flag = index % 2 == 0
        ids = tokenizer.encode(text, allow_control=flag)
        return ids == wanted[flag] and tokenizer.decode(ids, skip_special_tokens=False) == text

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(400)))


# --- GGUF ---------------------------------------------------------------------------------------


def test_gguf_byte_level_equals_its_twin(tmp_path: Path) -> None:
    """Rebuilt from tokens and merges, the tokenizer gives the ids that it was trained to give."""
    backend = byte_level_backend()
    tokenizer = Tokenizer.from_gguf(gguf_with(tmp_path / "t.gguf", byte_level_metadata(backend)))
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == backend.encode(text).ids
        assert tokenizer.decode(ids) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.special_ids) == (1, 0, {0, 1})


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TIKTOKEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,DIGITS}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize(
    ("pre", "splits"),
    [
        ("gpt-2", [GPT2]),
        ("smollm", [r"\p{N}|[^\p{N}]+", GPT2]),
        ("llama-bpe", [TIKTOKEN.replace("DIGITS", "3")]),
        ("qwen2", [TIKTOKEN.replace("DIGITS", "1")]),
    ],
)
def test_splits_by_name(pre: str, splits: list[str], tmp_path: Path) -> None:
    """Text is cut where each model's published pattern cuts it, before any merge.

    The pattern is run by the `regex` module. Every token of the vocabulary is one byte, and merges
    join equal digits, letters and spaces: the ids are those of the pieces encoded one by one.
    """
    backend = byte_level_backend(control=[])
    tokenizer = Tokenizer.from_gguf(
        gguf_with(tmp_path / "t.gguf", byte_level_metadata(backend, pre=pre, add_bos_token=False))
    )
    text = "It's 12345 o'clock,\r\n\n   THE dogs'LL over lazy   42times!!\n  end "
    pieces = [text]
    for pattern in splits:
        pieces = [part for piece in pieces for part in regex.findall(pattern, piece)]
    assert "".join(pieces) == text
    state = json.loads(backend.to_str())["model"]
    whole = {state["vocab"][token] for token in state["vocab"]} if pre == "llama-bpe" else set()
    wanted = []
    for piece in pieces:
        spelled = "".join(_visible(byte) for byte in piece.encode())
        if whole and spelled in state["vocab"]:  # llama-bpe takes a word that is a token as it is
            wanted.append(state["vocab"][spelled])
        else:
            wanted += _merge(spelled, state)
    assert tokenizer.encode(text) == wanted


def _visible(byte: int) -> str:
    """GPT-2's printable stand-in for a byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return chr(byte if byte in printable else 256 + [b for b in range(256) if b not in printable].index(byte))


def _merge(word: str, model: dict[str, Any]) -> list[int]:
    """Textbook BPE: apply the earliest merge that fits, as long as one does."""
    parts = list(word)
    for left, right in model["merges"]:
        index = 0
        while index < len(parts) - 1:
            if parts[index : index + 2] == [left, right]:
                parts[index : index + 2] = [left + right]
            index += 1
    return [model["vocab"][part] for part in parts]


def test_gguf_bos_follows_the_file_or_the_family(tmp_path: Path) -> None:
    """add_bos_token decides; where it is absent llama-bpe adds one and gpt-2 does not."""
    backend = byte_level_backend()
    for pre, flag, count in [("gpt-2", None, 0), ("gpt-2", True, 1), ("llama-bpe", None, 1)]:
        metadata = byte_level_metadata(backend, pre=pre, add_bos_token=flag)
        tokenizer = Tokenizer.from_gguf(gguf_with(tmp_path / "t.gguf", metadata))
        assert tokenizer.encode("fox").count(1) == count
        assert 1 not in tokenizer.encode("fox", add_special_tokens=False)


def test_llama_bpe_takes_a_known_word_whole(tmp_path: Path) -> None:
    """llama-bpe emits a word that is a token even where no merges lead to it; gpt-2 does not."""
    metadata = byte_level_metadata(byte_level_backend())
    tokens = [*metadata["tokenizer.ggml.tokens"], "zyzzyva"]
    for pre, whole in (("llama-bpe", True), ("gpt-2", False)):
        lists = {"tokens": tokens, "token_type": [1] * len(tokens)}
        changed = metadata | {f"tokenizer.ggml.{key}": value for key, value in lists.items()}
        file = gguf_with(tmp_path / "t.gguf", changed | {"tokenizer.ggml.pre": pre})
        ids = Tokenizer.from_gguf(file).encode("zyzzyva", add_special_tokens=False)
        assert (ids == [len(tokens) - 1]) is whole


def test_qwen2_normalises_to_composed_characters(tmp_path: Path) -> None:
    """qwen2 text is brought to NFC, as that family's tokenizer.json does; gpt-2 text is left alone."""
    backend = byte_level_backend()
    for pre, composed in (("qwen2", True), ("gpt-2", False)):
        tokenizer = Tokenizer.from_gguf(gguf_with(tmp_path / "t.gguf", byte_level_metadata(backend, pre=pre)))
        assert (tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")) is composed


def test_gguf_user_defined_tokens_are_matched_whole(tmp_path: Path) -> None:
    """Token type 4 is one id in any text and is no special token; type 3 is special."""
    backend = byte_level_backend()
    backend.add_tokens([user_defined("<think>")])
    tokenizer = Tokenizer.from_gguf(gguf_with(tmp_path / "t.gguf", byte_level_metadata(backend)))
    think = backend.token_to_id("<think>")
    assert tokenizer.encode("a<think>b").count(think) == 1
    assert think not in tokenizer.special_ids


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"merges": None}, TokenizerError, "tokenizer.ggml.merges is missing"),
        ({"tokens": None}, TokenizerError, "tokenizer.ggml.tokens is missing"),
        ({"token_type": [1, 1]}, TokenizerError, "token_type has 2 entries, .*tokens has 3"),
        ({"merges": ["nope x"]}, TokenizerError, "tokens and merges do not fit together"),
        ({"merges": ["nospace"]}, TokenizerError, "holds 'nospace', not 'left right'"),
        ({"pre": "viking"}, UnsupportedModel, "tokenizer.ggml.pre = 'viking' is not supported.*smollm"),
        ({"model": "bert"}, UnsupportedModel, "tokenizer.ggml.model = 'bert' is not supported"),
        ({"model": None}, UnsupportedModel, "tokenizer.ggml.model = None"),
        ({"eos_token_id": 99999}, TokenizerError, "eos_token_id is 99999, there are 3"),
    ],
)
def test_gguf_metadata_that_does_not_fit(
    changes: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    """Lists that are missing or disagree, and unknown kinds, are refused by name."""
    metadata = byte_level_metadata(byte_level_backend(), **changes)
    with pytest.raises(error, match=words):
        Tokenizer.from_gguf(gguf_with(tmp_path / "t.gguf", metadata))


@pytest.mark.skipif(not STORIES.is_dir(), reason="the stories260K checkpoint is not here")
def test_sentencepiece_directory_and_gguf_equal_transformers(tmp_path: Path) -> None:
    """A SentencePiece-style tokenizer gives transformers' ids, from its directory and from GGUF scores."""
    reference = AutoTokenizer.from_pretrained(STORIES)
    metadata = sentencepiece_metadata(STORIES / "tokenizer.json")
    from_gguf = Tokenizer.from_gguf(gguf_with(tmp_path / "t.gguf", metadata))
    for tokenizer in (Tokenizer.from_directory(STORIES), from_gguf):
        for text in [*TEXTS, "Once upon a time, there was a little girl named Lily.", "a\x00b"]:
            ids = tokenizer.encode(text)
            assert ids == reference(text).input_ids
            assert tokenizer.decode(ids) == text
        spelled = tokenizer.encode("<s>hi</s><unk>")
        assert spelled[0] == 1
        assert not {0, 1, 2} & set(spelled[1:])
        joined = b"".join(map(tokenizer.token_bytes, tokenizer.encode("é 😀", add_special_tokens=False)))
        assert joined == " é 😀".encode()  # SentencePiece puts a space in front


@pytest.mark.skipif(not STORIES.is_dir(), reason="the stories260K checkpoint is not here")
def test_sentencepiece_merges_never_spell_a_control_token(tmp_path: Path) -> None:
    """Where `s>` is a token, `<` and `s>` must not merge into the control token `<s>`."""
    metadata = sentencepiece_metadata(STORIES / "tokenizer.json")
    metadata["tokenizer.ggml.tokens"][-1] = "s>"
    tokenizer = Tokenizer.from_gguf(gguf_with(tmp_path / "t.gguf", metadata))
    assert tokenizer.encode("a<s>").count(1) == 1  # the BOS


@pytest.mark.skipif(not STORIES.is_dir(), reason="the stories260K checkpoint is not here")
def test_sentencepiece_chat_keeps_text_around_shielded_strings(tmp_path: Path) -> None:
    """Cutting `<s>` in content adds no space where the pieces meet."""
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    metadata = sentencepiece_metadata(STORIES / "tokenizer.json") | {"tokenizer.chat_template": template}
    tokenizer = Tokenizer.from_gguf(gguf_with(tmp_path / "t.gguf", metadata))
    ids = tokenizer.encode_chat([{"role": "user", "content": "Once<s>upon</s> a"}])
    assert ids[0] == 1
    assert not {0, 1, 2} & set(ids[1:])
    assert tokenizer.decode(ids) == "Once<s>upon</s> a"


@pytest.mark.skipif(not STORIES.is_dir(), reason="the stories260K checkpoint is not here")
def test_sentencepiece_scores_are_required(tmp_path: Path) -> None:
    """Without scores there are no merges: a TokenizerError."""
    metadata = sentencepiece_metadata(STORIES / "tokenizer.json", scores=None)
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.scores is missing"):
        Tokenizer.from_gguf(gguf_with(tmp_path / "t.gguf", metadata))
