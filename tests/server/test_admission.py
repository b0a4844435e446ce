"""What is said of the time until there is place, against clients simulated on a clock of their own."""

from __future__ import annotations

import heapq
import random

import httpx
import pytest
from fastapi.testclient import TestClient

from octavo.server import ServerConfig, create_app
from octavo.server.admission import Gate, Hold, Room
from octavo.server.errors import QueueFull
from octavo.server.keys import ApiKey

from .fake_engine import FakeEngineThread

URL = "/v1/completions"


class Clock:
    """Time that a test moves."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def held(room: Room, count: int) -> Hold:
    hold = Hold(room)
    hold.take(count)
    return hold


@pytest.mark.parametrize("seed", range(5))
def test_the_rate_at_which_places_come_back(seed: int) -> None:
    """In a full room whose requests take random times, what is said is what it takes on average."""
    rng, clock = random.Random(seed), Clock()
    room, ends = Room(20, clock), list[tuple[float, int, Hold]]()
    said, took, asked = 0.0, 0.0, 0
    for number in range(3000):
        while room.missing(2):
            clock.now, _, hold = heapq.heappop(ends)
            hold.give_back()
        heapq.heappush(ends, (clock.now + rng.uniform(1, 9), number, held(room, 2)))
        while not room.missing(2):
            heapq.heappush(ends, (clock.now + rng.uniform(1, 9), -number, held(room, 2)))
        if number > 500:
            said += room.seconds_until(2)
            took += ends[0][0] - clock.now
            asked += 1
    assert said / asked == pytest.approx(took / asked, rel=0.25)
    while ends:
        heapq.heappop(ends)[2].give_back()
    assert room.taken == 0
    assert room.seconds_until(2) == 0


def test_nothing_comes_back() -> None:
    """When nothing comes back any longer, the time that is said grows with the wait."""
    clock = Clock()
    room = Room(4, clock)
    for _ in range(100):
        hold = held(room, 4)
        clock.now += 1
        hold.give_back()
    held(room, 4)
    assert room.seconds_until(1) == pytest.approx(0.25)
    clock.now += 400
    assert room.seconds_until(1) == pytest.approx(100)


def test_a_lull_says_nothing() -> None:
    """An hour without requests does not count as an hour in which nothing came back."""
    clock = Clock()
    room = Room(4, clock)
    hold = held(room, 4)
    clock.now += 2
    hold.give_back()
    clock.now += 3600
    held(room, 4)
    assert room.seconds_until(4) == pytest.approx(2)


def test_parts_come_back() -> None:
    """Places of one request that come back one by one count each with its own stay."""
    clock = Clock()
    room = Room(10, clock)
    hold = held(room, 4)
    clock.now += 8
    hold.take(4)
    clock.now += 2
    hold.give_back(2)  # taken 2 and 10 seconds ago, on average 6
    assert (room.taken, hold.count) == (6, 6)
    assert room.seconds_until(5) == pytest.approx(6 * 1 / 6)
    hold.give_back()
    hold.give_back()
    assert (room.taken, hold.count) == (0, 0)


def test_a_full_gate_says_when() -> None:
    """The refusal carries the estimate; the place that is free does not count."""
    clock = Clock()
    gate = Gate(4, clock)
    with gate.places(3):
        clock.now += 30
        with pytest.raises(QueueFull) as caught:
            gate.check(2)
        assert caught.value.retry_after == pytest.approx(10)
        gate.check(1)
    gate.check(4)


@pytest.mark.parametrize("limited", ["queue", "key"])
def test_retry_after_over_http(engine: FakeEngineThread, limited: str) -> None:
    """The header is a whole number of seconds, from what the server saw."""
    secret = ApiKey.from_secret("a", "ann", max_concurrent=1 if limited == "key" else None)
    config = ServerConfig(keys=(secret,), max_open_sequences=1 if limited == "queue" else 100)
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Room.__init__, "__defaults__", (clock,))
        patch.setattr(Gate.__init__, "__defaults__", (clock,))
        app = create_app(engine, config)
        found: list[str] = []
        with TestClient(app, headers={"Authorization": "Bearer a"}) as client:
            stream = engine.stream

            async def asks_again(*args: object) -> object:
                clock.now += 41.5
                async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as other:
                    headers = {"Authorization": "Bearer a"}
                    answer = await other.post("http://x" + URL, json={"prompt": "b"}, headers=headers)
                found.append(f"{answer.status_code} {answer.headers['retry-after']}")
                async for delta in stream(*args):  # type: ignore[arg-type]
                    yield delta

            patch.setattr(engine, "stream", asks_again)
            assert client.post(URL, json={"prompt": "a"}).status_code == 200
    assert found == ["429 42"]
