"""Carries out what a beam search decided: parents forked, losers dropped, tokens appended."""

from __future__ import annotations

from octavo.engine.live import Live
from octavo.sched import Branch, Scheduler


def advance_beams(live: Live, scheduler: Scheduler) -> bool:
    """If every running beam has offered, take the next round; True when the search is over, and then the
    request's branches are finished."""
    search = live.search
    assert search is not None
    if not search.ready:
        return False
    moves = search.advance()
    if search.over:
        scheduler.abort(live.request)
        return True
    going_on = {move.parent for move in moves}
    for place, branch in enumerate(live.beams):
        if place not in going_on:
            scheduler.drop(branch)
            live.states.pop(branch, None)
    beams: list[Branch] = []
    for move in moves:  # forks come before any token is appended
        branch = live.beams[move.parent]
        if branch in beams:
            parent, branch = branch, scheduler.fork(branch)
            live.fork_state(parent, branch)
        beams.append(branch)
    for branch, move in zip(beams, moves, strict=True):
        scheduler.resume(branch, move.token)
        live.state(branch).add(move.token)
    live.beams = beams
    return False
