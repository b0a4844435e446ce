"""What an engine says of itself when it starts: rows of a name and a value, with the option that changes it
where there is one. What is off is named as well, and why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.attention import backend_note, make_backend
from octavo.engine.propose import Proposer
from octavo.engine.scheduling import scheduling_rows
from octavo.ops import ops_note

if TYPE_CHECKING:
    from octavo.engine.engine import Engine

Rows = list[tuple[str, str]]


def start_rows(engine: Engine, proposer: Proposer | None) -> Rows:
    """Model, memory, how it computes, how much at once, and what is on and off. proposer: who guesses."""
    return [
        *_model_rows(engine),
        *_kv_rows(engine),
        *_compute_rows(engine),
        *_cache_rows(engine),
        *scheduling_rows(engine.config, engine.budget),
        (
            "speculation",
            proposer.note()
            if proposer is not None
            else "off (--speculate N guesses tokens from a sequence's own text, or by --draft-model)",
        ),
        (
            "checked mode",
            "on" if engine.config.checked else "off (a second check of each batch, for debugging)",
        ),
    ]


def _model_rows(engine: Engine) -> Rows:
    model = engine.model
    return [
        ("model", f"{model.name} ({model.config.architecture}, {model.path})"),
        ("dtype", f"{engine.config.dtype} (--dtype)"),
        ("weights", f"{model.weights_bytes:,} bytes, {model.decoder.weights_note}"),
        ("products", model.decoder.kernels),
        ("activations", engine.activations.row()),
    ]


def _kv_rows(engine: Engine) -> Rows:
    kv, budget = engine.kv_format, engine.budget
    memory = budget.num_blocks * budget.bytes_per_block
    source = "num_blocks" if engine.config.num_blocks is not None else "kv_memory"
    context = f"{budget.max_model_len:,} tokens"
    note = budget.context_note
    return [
        ("KV dtype", f"{kv.dtype} ({kv.dtype_reason})"),
        ("KV block", f"{kv.block_size} tokens, {budget.bytes_per_block:,} bytes ({kv.block_reason})"),
        ("KV blocks", f"{budget.num_blocks:,}, {memory:,} bytes ({source})"),
        ("KV capacity", f"{budget.num_blocks * budget.block_size:,} tokens"),
        ("context", f"{context}; {note}" if note else f"{context} per request"),
    ]


def _compute_rows(engine: Engine) -> Rows:
    config, backend = engine.config, engine.backend
    own = type(backend) is type(make_backend())
    return [
        ("attention", backend_note() if own else backend.name),
        ("norms, sampling", ops_note()),
        ("threads", f"{engine.threads.number} ({engine.threads.reason})"),
        ("batch", f"{config.max_num_seqs} sequences, {config.max_batched_tokens:,} tokens a step"),
    ]


def _cache_rows(engine: Engine) -> Rows:
    host = _tier_row(engine, engine.budget.host_blocks, "--host-cache SIZE keeps evicted blocks")
    disk = _tier_row(engine, engine.budget.disk_blocks, "--disk-cache PATH keeps them across restarts")
    return [
        ("prefix caching", "on" if engine.config.prefix_caching else "off (--no-prefix-caching)"),
        ("host cache", host),
        ("disk cache", disk),
    ]


def _tier_row(engine: Engine, blocks: int, how: str) -> str:
    if not blocks:
        return f"off ({how})"
    size = f"{blocks:,} blocks, {blocks * engine.budget.bytes_per_block:,} bytes"
    found = engine.pool.stats().disk.cached if blocks == engine.budget.disk_blocks else 0
    return f"{size}; {found:,} blocks found from before" if found else size
