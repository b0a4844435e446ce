"""A step's logits to its tokens: which rows to sample, with what, and their logprobs.

hidden [T, E] --rows that sample--> logits [S, V] --draws--> tokens, and logprobs where asked for
    \\--prompt positions of requests with prompt_logprobs, a slice at a time--> their logprobs
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from llguidance import LLMatcher
from torch import Tensor

from octavo.engine.config import JUDGED_ROWS
from octavo.engine.errors import BadLogits
from octavo.engine.grammar import Masks
from octavo.engine.live import Live
from octavo.engine.logprobs import TokenLogprobs, token_logprobs
from octavo.engine.runner import Runner
from octavo.engine.sampler import NO_TOKEN, Draw, adjusted, sample
from octavo.sched import Branch, Plan, PlanEntry, Request


class Choice(NamedTuple):
    """A sampled token, NO_TOKEN where there was none to sample; its logprobs where the request needs them."""

    token: int
    logprobs: TokenLogprobs | None


def mask_jobs(plan: Plan, lives: Mapping[Request, Live]) -> list[tuple[LLMatcher, list[int]]]:
    """The matchers of the entries that sample under a form, each with its entry's guesses, in order."""
    jobs = []
    for entry in plan.entries:
        matcher = lives[entry.branch.request].state(entry.branch).matcher if entry.num_samples else None
        if matcher is not None:
            jobs.append((matcher, guesses_of(entry)))
    return jobs


def guesses_of(entry: PlanEntry) -> list[int]:
    """The tokens of an entry that are guesses."""
    return entry.tokens[len(entry.tokens) - entry.num_draft :]


def choose(
    plan: Plan, logits: Tensor, lives: Mapping[Request, Live], masks: Masks | None = None
) -> list[list[Choice]]:
    """Sample from logits `[S, V]`, a row per entry that samples and one per guess; masks as for mask_jobs().

    Per entry `num_samples` choices; with guesses, those that came true and the one after. A guess comes
    true if it is the token sampled in its place, so the result is as without guesses. A beam's
    continuations go to its search, and its entry gets none. A request whose logits are NaN or infinite gets
    its `error` set, a BadLogits.
    """
    draws: list[Draw] = []
    spans: list[tuple[PlanEntry, range]] = []
    beams: list[tuple[Live, Branch, Draw]] = []
    row, mask_row = 0, 0
    for entry in plan.entries:
        live, first = lives[entry.branch.request], len(draws)
        if entry.num_samples:
            count = 1 + entry.num_draft
            masked = masks is not None and live.state(entry.branch).matcher is not None
            allowed = masks[mask_row : mask_row + count] if masks is not None and masked else None
            made = _draws(entry, live, row, allowed)
            row, mask_row = row + count, mask_row + (count if masked else 0)
            if live.search is not None:
                beams.append((live, entry.branch, made[0]))
            else:
                draws += made
        spans.append((entry, range(first, len(draws))))
    if beams:
        _offer(logits, beams)
    tokens = sample(logits, draws)
    if NO_TOKEN in tokens:
        for entry, span in spans:
            rows = [draws[i].row for i in span if tokens[i] == NO_TOKEN]
            _check_rows(lives[entry.branch.request], logits, rows)
    kept = [_accepted(entry, span, tokens) for entry, span in spans]
    judged = _judge(logits, draws, tokens, [i for span in kept for i in span])
    return [[Choice(tokens[i], judged.get(i)) for i in span] for span in kept]


def _draws(entry: PlanEntry, live: Live, row: int, allowed: Masks | None) -> list[Draw]:
    """What to draw for an entry whose logits begin at `row`."""
    branch, state = entry.branch, live.state(entry.branch)
    position = len(branch.tokens) - len(live.request.prompt)
    made: list[Draw] = []
    for at in range(1 + entry.num_draft):
        if at:
            state = state.after(entry.tokens[at - 1 - entry.num_draft])
        banned = live.banned(state, position + at)
        mask = allowed[at] if allowed is not None else None
        made += [
            Draw(
                row + at, live.params, live.seed, branch.index + i, position + at, banned, state.counts, mask
            )
            for i in range(entry.num_samples)
        ]
    return made


def _accepted(entry: PlanEntry, span: range, tokens: Sequence[int]) -> range:
    """The draws of an entry that count: all, or those up to the first guess that did not come true."""
    if not entry.num_draft:
        return span
    guesses = guesses_of(entry)
    true = next((at for at, guess in enumerate(guesses) if tokens[span[at]] != guess), len(guesses))
    return span[: true + 1]


def _check_rows(live: Live, logits: Tensor, rows: Sequence[int]) -> None:
    """Give a request up whose logits are no numbers: its KV may be as bad. Rows in which every token was
    ruled out pass; so only rows that gave no token need be looked at."""
    if any(not math.isfinite(float(logits[row].max())) for row in rows):  # max() is NaN where one is
        live.error = BadLogits("the model's logits for this request are NaN or infinite")


def _offer(logits: Tensor, beams: Sequence[tuple[Live, Branch, Draw]]) -> None:
    """Give each beam's likeliest continuations to its search: bias and penalties change logprobs, as in
    Hugging Face's beam search, not logits."""
    scores = logits[[draw.row for _, _, draw in beams]].log_softmax(dim=-1)
    scores = adjusted(scores, [replace(draw, row=i) for i, (_, _, draw) in enumerate(beams)])
    most = max(live.search.keep for live, _, _ in beams if live.search is not None)
    best = scores.topk(min(most, scores.shape[1]))
    found = zip(beams, best.values.numpy(), best.indices.tolist(), strict=True)
    for (live, branch, draw), values, ids in found:
        assert live.search is not None
        if not math.isfinite(values[0]):  # NaN is first; so is -infinity, where all were ruled out
            _check_rows(live, logits, [draw.row])
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
        for start in range(max(entry.start, len(done) - 1), last, JUDGED_ROWS):
            stop = min(start + JUDGED_ROWS, last)
            shift = first - entry.start
            logits = runner.logits(hidden[start + shift : stop + shift])
            top = live.params.prompt_logprobs or 0
            done += token_logprobs(logits, prompt[start + 1 : stop + 1], [top] * (stop - start))


def _judge(
    logits: Tensor, draws: Sequence[Draw], tokens: Sequence[int], kept: Sequence[int]
) -> dict[int, TokenLogprobs]:
    """The logprobs of those draws in `kept` whose requests need them."""
    wanted = [
        i
        for i in kept
        if tokens[i] != NO_TOKEN
        and (draws[i].params.logprobs is not None or draws[i].params.best_of is not None)
    ]
    if not wanted:
        return {}
    tops = [draws[i].params.logprobs or 0 for i in wanted]
    judged = token_logprobs(logits[[draws[i].row for i in wanted]], [tokens[i] for i in wanted], tops)
    return dict(zip(wanted, judged, strict=True))
