"""Small tokenizers: directories as transformers writes them, and GGUF metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

from octavo.models.gguf_file import GgufFile
from tests.models.gguf_files import write_gguf

CORPUS = ["The quick brown fox jumps over the lazy dog 12345 times.", "def f(x): return x + 1\n"] * 3
CONTROL = ["<|end|>", "<|start|>"]
CHATML = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


def byte_level_backend(control: list[str] = CONTROL) -> Tokenizer:
    """Train a byte-level BPE on a few sentences."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=control, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def write_directory(
    directory: Path, backend: Tokenizer | None = None, bos: bool = False, **config: Any
) -> Path:
    """Write tokenizer.json and tokenizer_config.json; with `bos`, the post-processor adds `<|start|>`."""
    directory.mkdir(parents=True, exist_ok=True)
    backend = backend or byte_level_backend()
    if bos:
        start = backend.token_to_id("<|start|>")
        backend.post_processor = TemplateProcessing(
            single="<|start|> $A", special_tokens=[("<|start|>", start)]
        )
    backend.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def byte_level_metadata(backend: Tokenizer, pre: str = "gpt-2", **changes: Any) -> dict[str, Any]:
    """GGUF metadata of a byte-level BPE; `changes` replace keys, None removes one."""
    state = json.loads(backend.to_str())
    tokens = [backend.id_to_token(index) for index in range(backend.get_vocab_size())]
    special = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
    values = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "merges": [" ".join(pair) for pair in state["model"]["merges"]],
        "token_type": [1 if t not in special else 3 if special[t] else 4 for t in tokens],
        "bos_token_id": 1,
        "eos_token_id": 0,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


def sentencepiece_metadata(tokenizer_json: Path, **changes: Any) -> dict[str, Any]:
    """GGUF metadata of a SentencePiece-style tokenizer.json: scores stand in for the merges."""
    model = json.loads(tokenizer_json.read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    rank = {"".join(pair): index for index, pair in reversed(list(enumerate(pairs)))}
    values = {
        "model": "llama",
        "tokens": tokens,
        "scores": [-float(rank.get(token, 1_000_000)) for token in tokens],
        "token_type": [
            2 if t == "<unk>" else 3 if t in ("<s>", "</s>") else 6 if t.startswith("<0x") else 1
            for t in tokens
        ],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


def gguf_with(path: Path, metadata: dict[str, Any]) -> GgufFile:
    """Write a GGUF file that has nothing but metadata."""
    return GgufFile(write_gguf(path, "llama", metadata, {}))


def user_defined(text: str) -> AddedToken:
    """An added token that is not special."""
    return AddedToken(text, special=False, normalized=False)
