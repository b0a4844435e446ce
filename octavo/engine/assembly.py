"""Sampled tokens to what callers get: text, what ends a sequence and why, and the best of several."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.engine.errors import NoTokenAllowed
from octavo.engine.live import Live
from octavo.engine.outputs import RequestDelta, SequenceDelta
from octavo.engine.sampler import NO_TOKEN
from octavo.engine.sampling import Choice
from octavo.sched import Branch


def grow(live: Live, branch: Branch, choice: Choice, length: int) -> SequenceDelta:
    """A branch got `choice` as output token number `length` (the first is 1): its text, and whether it
    ends here. finish_reason is set if so."""
    params, token, state = live.params, choice.token, live.state(branch)
    if live.request.max_tokens == 0:  # only the prompt's logprobs were wanted
        return SequenceDelta(branch.index, finish_reason="length")
    if token == NO_TOKEN:
        return _dead_end(live, branch)
    state.add(token)
    delta = SequenceDelta(branch.index, [token])
    if choice.logprobs is not None:
        state.cumulative_logprob += choice.logprobs.logprob
        delta.cumulative_logprob = state.cumulative_logprob
        if params.logprobs is not None:
            delta.logprobs = [choice.logprobs]
    searching = length > params.min_tokens
    text = state.text
    if token in live.stop_ids and searching:
        delta.text, _ = text.flush(look_for_stop=searching)
        delta.finish_reason = "stop"
        delta.stop_reason = None if token in live.eos_ids and not params.ignore_eos else token
        return delta
    delta.text, stop = text.push(token, look_for_stop=searching)
    if stop is None and (state.complete or length >= live.request.max_tokens):
        rest, stop = text.flush(look_for_stop=searching)
        delta.text += rest
        delta.finish_reason = "stop" if state.complete else "length"
    if stop is not None:
        delta.finish_reason, delta.stop_reason = "stop", stop
    return delta


def _dead_end(live: Live, branch: Branch) -> SequenceDelta:
    """No token may follow: the end, if the output's form is complete, else the request cannot go on."""
    state = live.state(branch)
    if live.error is None and (state.matcher is None or not state.matcher.is_accepting()):
        live.error = NoTokenAllowed(
            "no token could be sampled: bad_words, min_tokens and structured_outputs together leave none: "
            "loosen one of them"
        )
    return SequenceDelta(branch.index, [], state.text.flush()[0], "stop")


def delta_of(
    live: Live, changes: Sequence[SequenceDelta], error: Exception | None = None
) -> RequestDelta | None:
    """What a request gained in a step; None while best_of holds it back."""
    request = live.request
    finished = request.finished
    shown = list(changes)
    if live.params.ranked:
        for change in changes:
            if change.index in live.held:
                live.held[change.index].add(change)
            else:
                live.held[change.index] = change
        shown = _best(live) if finished and error is None else []
    scores = None
    if live.prompt_logprobs is not None and shown and not live.prompt_sent:
        live.prompt_sent, scores = True, live.prompt_logprobs
    if not (shown or finished or error):
        return None
    return RequestDelta(
        live.id, shown, finished, len(request.prompt), request.num_cached or 0, error, scores,
        live.num_guessed, live.num_accepted,
    )  # fmt: skip


def beam_deltas(live: Live) -> list[SequenceDelta]:
    """The n best finished beams of a search that is over, best first."""
    assert live.search is not None
    deltas = []
    if len(live.search.finished) < live.params.n:
        live.error = NoTokenAllowed(
            f"only {len(live.search.finished)} of n {live.params.n} beams found an end: loosen bad_words or "
            "structured_outputs, or lower n"
        )
    for index, beam in enumerate(live.search.finished[: live.params.n]):
        tokens, text = list(beam.tokens), live.new_text()
        stopped = tokens[-1] in live.stop_ids
        shown = [text.push(token)[0] for token in (tokens[:-1] if stopped else tokens)] + [text.flush()[0]]
        delta = SequenceDelta(index, tokens, "".join(shown), "stop" if stopped else "length")
        if stopped and (tokens[-1] not in live.eos_ids or live.params.ignore_eos):
            delta.stop_reason = tokens[-1]
        delta.score = beam.score
        deltas.append(delta)
    return deltas


def _best(live: Live) -> list[SequenceDelta]:
    """The n likeliest of the finished sequences, numbered anew."""
    ranked = sorted(live.held.values(), key=lambda held: (-(held.cumulative_logprob or 0.0), held.index))
    best = ranked[: live.params.n]
    for index, sequence in enumerate(best):
        sequence.index = index
    return best
