"""Which rows of a step's hidden states become logits."""

from __future__ import annotations

import random

import torch

from octavo.engine.runner import sampled_rows
from octavo.kv import Actions
from octavo.sched import Branch, Plan, PlanEntry, Request


def test_the_rows_that_are_sampled_are_those_of_the_last_tokens_and_of_guesses() -> None:
    """Random steps of chunks, whole prompts, decodes and guesses: each entry that samples has the row of its
    last known token and one for each guess, in order; the others have none."""
    rng = random.Random(1)
    branch = Branch(Request([1], 1), 0, [1])
    whole = 0
    for _ in range(300):
        entries, wanted, rows = [], [], 0
        decodes = rng.random() < 0.3
        for _ in range(rng.randrange(1, 6)):
            samples = 1 if decodes else rng.randrange(3)
            draft = rng.randrange(3) if samples == 1 and not decodes else 0
            count = 1 + draft + (0 if decodes else rng.randrange(4))
            entries.append(PlanEntry(branch, 0, list(range(count)), None, samples, draft))  # type: ignore[arg-type]
            rows += count
            wanted += list(range(rows - draft - 1, rows)) if samples else []
        hidden = torch.rand(rows, 3)
        found = sampled_rows(Plan(tuple(entries), Actions(()), (), ()), hidden)
        assert torch.equal(found, hidden[wanted])
        whole += len(wanted) == rows
    assert 50 < whole < 250
