"""Small steps that several kv tests share."""

from octavo.kv import DEFAULT_SCOPE, Granted, Pool, Scope, Sequence


def compute(pool: Pool, seq: Sequence, tokens: list[int], *, check: bool = True) -> list[int]:
    """Reserve, extend and commit `tokens` as an engine's step would; returns the slots."""
    granted = seq.reserve(len(tokens))
    assert isinstance(granted, Granted)
    slots = seq.extend(len(tokens)).tolist()
    pool.drain()
    seq.commit(tokens)
    if check:
        pool.check()
    return slots


def prefill(pool: Pool, tokens: list[int], scope: Scope = DEFAULT_SCOPE) -> Sequence:
    """Open a sequence and compute what the cache did not have."""
    seq = pool.open(tokens, scope)
    compute(pool, seq, tokens[seq.num_cached :])
    return seq


def distinct(start: int, count: int) -> list[int]:
    """Tokens that share no prefix with those of another `start`."""
    return list(range(start * 100_000, start * 100_000 + count))
