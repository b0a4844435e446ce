"""A step's logits to its tokens: which rows to sample, with what, and their logprobs.

hidden [T, E] --rows that sample--> logits [S, V] --draws--> tokens, and logprobs where asked for
    \\--prompt positions of requests with prompt_logprobs, a slice at a time--> their logprobs
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from octavo.engine.live import Live
from octavo.engine.logprobs import TokenLogprobs, token_logprobs
from octavo.engine.runner import Runner
from octavo.engine.sampler import Draw, adjusted, sample
from octavo.sched import Branch, Plan, Request

_SLICE = 256  # prompt positions whose logits are in memory at once


class Choice(NamedTuple):
    """A sampled token, -1 where there was none to sample; its logprobs where the request needs them."""

    token: int
    logprobs: TokenLogprobs | None


def choose(plan: Plan, logits: Tensor, lives: Mapping[Request, Live]) -> list[list[Choice]]:
    """Sample each entry's `num_samples` tokens from logits `[S, V]`, a row per entry that samples.

    A beam's continuations go to its search instead, and its entry gets none.
    """
    draws: list[Draw] = []
    tops: list[int | None] = []
    beams: list[tuple[Live, Branch, Draw]] = []
    row = 0
    for entry in plan.entries:
        if not entry.num_samples:
            continue
        live, branch = lives[entry.branch.request], entry.branch
        params, state = live.params, live.state(branch)
        position = len(branch.tokens) - len(live.request.prompt)
        banned = live.banned(state, position)
        needed = params.logprobs is not None or params.best_of is not None
        made = [
            Draw(row, params, live.seed, branch.index + i, position, banned, state.counts)
            for i in range(entry.num_samples)
        ]
        if live.search is not None:
            beams.append((live, branch, made[0]))
        else:
            draws += made
            tops += [(params.logprobs or 0) if needed else None] * len(made)
        row += 1
    if beams:
        _offer(logits, beams)
    choices = iter(_with_logprobs(logits, draws, sample(logits, draws), tops))
    return [
        [] if lives[entry.branch.request].search else [next(choices) for _ in range(entry.num_samples)]
        for entry in plan.entries
    ]


def _offer(logits: Tensor, beams: Sequence[tuple[Live, Branch, Draw]]) -> None:
    """Give each beam's likeliest continuations to its search: bias and penalties change logprobs, as in
    Hugging Face's beam search, not logits."""
    scores = logits[[draw.row for _, _, draw in beams]].log_softmax(dim=-1)
    scores = adjusted(scores, [replace(draw, row=i) for i, (_, _, draw) in enumerate(beams)])
    most = max(live.search.keep for live, _, _ in beams if live.search is not None)
    best = scores.topk(min(most, scores.shape[1]))
    for (live, branch, _), values, ids in zip(beams, best.values.numpy(), best.indices.tolist(), strict=True):
        assert live.search is not None
        keep = live.search.keep
        live.search.offer(live.beams.index(branch), values[:keep], ids[:keep])


def score_prompts(plan: Plan, hidden: Tensor, runner: Runner, lives: Mapping[Request, Live]) -> None:
    """Judge the prompt tokens that follow this step's positions, for requests that want them judged."""
    end = 0
    for entry in plan.entries:
        first, end = end, end + len(entry.tokens)
        live = lives[entry.branch.request]
        done, prompt = live.prompt_logprobs, live.request.prompt
        if done is None:
            continue
        # Position p judges token p + 1; the last position's logits are for the output.
        last = min(entry.start + len(entry.tokens), len(prompt) - 1)
        for start in range(max(entry.start, len(done) - 1), last, _SLICE):
            stop = min(start + _SLICE, last)
            shift = first - entry.start
            logits = runner.logits(hidden[start + shift : stop + shift])
            top = live.params.prompt_logprobs or 0
            done += token_logprobs(logits, prompt[start + 1 : stop + 1], [top] * (stop - start))


def _with_logprobs(
    logits: Tensor, draws: Sequence[Draw], tokens: Sequence[int], tops: Sequence[int | None]
) -> list[Choice]:
    wanted = [i for i, top in enumerate(tops) if top is not None and tokens[i] >= 0]
    if not wanted:
        return [Choice(token, None) for token in tokens]
    judged = token_logprobs(
        logits[[draws[i].row for i in wanted]], [tokens[i] for i in wanted], [tops[i] or 0 for i in wanted]
    )
    found = dict(zip(wanted, judged, strict=True))
    return [Choice(token, found.get(i)) for i, token in enumerate(tokens)]
