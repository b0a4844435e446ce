"""Streamed text: whole characters, stop strings never shown, nothing lost."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from octavo.engine.detokenizer import Detokenizer
from octavo.models import LoadedModel


def from_bytes(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", "replace")


def run(data: bytes, stop: Sequence[str] = ()) -> tuple[list[str], str | None]:
    """Push bytes as tokens until a stop; returns the pieces shown and the stop."""
    text, pieces = Detokenizer(from_bytes, [], stop), []
    for token in data:
        shown, found = text.push(token)
        pieces.append(shown)
        if found is not None:
            return pieces, found
    shown, found = text.flush()
    return [*pieces, shown], found


@pytest.mark.parametrize("text", ["plain", "café 😀 日本語", "e\u0301", "👩‍👩‍👧‍👦 family", ""])
def test_characters_are_never_split(text: str) -> None:
    """Byte by byte, each piece is whole characters and together they are the text."""
    pieces, _ = run(text.encode())
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_incomplete_character_at_the_end_is_shown_once() -> None:
    """A cut character comes out as U+FFFD at flush, as in the whole text."""
    data = "ab😀".encode()[:-1]
    pieces, _ = run(data)
    assert "".join(pieces) == data.decode("utf-8", "replace")


def test_random_bytes_are_the_same_as_whole() -> None:
    """500 random bytes, invalid ones for long stretches: pieces add up to the whole decoding."""
    rng = random.Random(4)
    for _ in range(50):
        data = bytes(rng.choice((rng.randrange(128), rng.randrange(128, 256))) for _ in range(500))
        assert "".join(run(data)[0]) == data.decode("utf-8", "replace")
    assert "".join(run(b"\xff" * 300)[0]) == "\ufffd" * 300


def test_invalid_bytes_do_not_hold_text_back_for_ever() -> None:
    """After a bounded number of tokens something is shown."""
    text = Detokenizer(from_bytes, [])
    shown = [text.push(0xFF)[0] for _ in range(40)]
    assert len("".join(shown)) > 20


@pytest.mark.parametrize(
    ("text", "stop", "want", "found"),
    [
        ("one two three", ["two"], "one ", "two"),
        ("one two three", ["three", "two"], "one ", "two"),
        ("aaab", ["aab"], "a", "aab"),
        ("no stop here", ["zzz"], "no stop here", None),
        ("ends with sto", ["stop"], "ends with sto", None),
        ("x<|en", ["<|end|>", "<|"], "x", "<|"),
        ("stop", ["stop"], "", "stop"),
        ("日本語 end", ["本"], "日", "本"),
    ],
)
def test_stop_strings(text: str, stop: list[str], want: str, found: str | None) -> None:
    """The text ends before the first stop string; no piece shows any part of it."""
    pieces, reason = run(text.encode(), stop)
    assert ("".join(pieces), reason) == (want, found)
    shown = ""
    for piece in pieces:
        shown += piece
        assert want.startswith(shown)


def test_random_stops_agree_with_the_whole_text() -> None:
    """Random texts over two letters and random stops: cut where a search of the whole text cuts."""
    rng = random.Random(9)
    for _ in range(500):
        text = "".join(rng.choice("ab") for _ in range(rng.randint(0, 30)))
        stops = [
            "".join(rng.choice("ab") for _ in range(rng.randint(2, 5))) for _ in range(rng.randint(1, 3))
        ]
        pieces, _ = run(text.encode(), stops)
        ends = [text.find(s) + len(s) for s in stops if s in text]
        if ends:  # generation ends with the first token that completes a stop
            upto = text[: min(ends)]
            text = upto[: min(at for s in stops if (at := upto.find(s)) >= 0)]
        assert "".join(pieces) == text


@pytest.mark.model
def test_default_tokenizer_streams_what_it_decodes(smollm2: LoadedModel) -> None:
    """Random ids of the default model: streamed text equals the whole, also after a prompt."""
    rng = random.Random(2)
    decode = smollm2.tokenizer.decode
    for _ in range(20):
        prompt = [rng.randrange(smollm2.config.vocab_size) for _ in range(8)]
        ids = [rng.randrange(smollm2.config.vocab_size) for _ in range(60)]
        text = Detokenizer(decode, prompt)
        pieces = [text.push(token)[0] for token in ids]
        assert "".join(pieces) + text.flush()[0] == decode(ids)
