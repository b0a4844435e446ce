"""The slab file after accidents: flipped bits, cut files, kill -9 and power loss at any moment.

Whatever happened, a block that get() serves has exactly the bytes that were put for its record.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import time
import traceback
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from octavo.engine.tiers import StoreMismatch
from octavo.engine.tiers.slab import PAGE, Geometry
from octavo.kv.store import BlockLost
from tests.engine.tiers.helpers import BLOCK_BYTES, content, open_disk, put, record, served, uid

NUM_SLOTS = 8
GEOMETRY = Geometry(NUM_SLOTS, BLOCK_BYTES)
SECTOR = 512


@pytest.fixture
def image(tmp_path: Path) -> bytes:
    """A file with block i in slot i."""
    store = open_disk(tmp_path / "made")
    for slot in range(NUM_SLOTS):
        put(store, slot, slot)
    store.close()
    return (tmp_path / "made").read_bytes()


def write_image(path: Path, data: bytes | bytearray) -> None:
    """Make `path` hold `data`, with a hole where nothing is in the table of slot headers."""
    hole, end = GEOMETRY.header(NUM_SLOTS), GEOMETRY.payload(0)
    with path.open("wb") as file:
        path.chmod(0o600)
        file.write(data[:hole])
        file.truncate(len(data))
        if len(data) > end:
            assert not any(data[hole:end:PAGE])
            file.seek(end)
            file.write(data[end:])


# ---- damage ---------------------------------------------------------------------------------------


def flip(data: bytes, position: int, bit: int) -> bytearray:
    changed = bytearray(data)
    changed[position] ^= 1 << bit
    return changed


def test_no_flipped_bit_is_ever_served(tmp_path: Path, image: bytes) -> None:
    """500 of them, in the file header, slot headers, payloads, and the bytes that nobody reads."""
    rng = random.Random(1)
    path = tmp_path / "slab"
    intact = {slot: uid(slot) for slot in range(NUM_SLOTS)}
    for number in range(500):
        slot = rng.randrange(NUM_SLOTS)
        kind = ("file header", "slot header", "payload", "padding")[number % 4]
        position = {
            "file header": rng.randrange(PAGE) if number % 8 else rng.randrange(80),
            "slot header": GEOMETRY.header(slot) + rng.randrange(PAGE if number % 8 == 1 else 200),
            "payload": GEOMETRY.payload(slot) + rng.randrange(BLOCK_BYTES),
            "padding": GEOMETRY.payload(slot) + rng.randrange(BLOCK_BYTES, GEOMETRY.stride),
        }[kind]
        if position >= len(image):
            continue  # the padding after the last payload is not in the file
        write_image(path, flip(image, position, rng.randrange(8)))
        if kind == "file header":
            with pytest.raises(StoreMismatch):
                open_disk(path)
            continue
        expected = {s: u for s, u in intact.items() if s != slot or kind == "padding"}
        for _ in range(2):  # the second time the damaged block has been forgotten
            store = open_disk(path)
            assert served(store) == expected, (kind, position)
            store.close()
        store = open_disk(path)
        assert dict(store.recover()).keys() == expected.keys()
        store.close()


def test_every_byte_of_a_headers_content_counts(tmp_path: Path, image: bytes) -> None:
    """Byte by byte over the parts that carry something."""
    path = tmp_path / "slab"
    for position in range(64):
        write_image(path, flip(image, position, position % 8))
        with pytest.raises(StoreMismatch):
            open_disk(path)
    for offset in range(160):
        write_image(path, flip(image, GEOMETRY.header(2) + offset, offset % 8))
        store = open_disk(path)
        assert sorted(served(store)) == [0, 1, 3, 4, 5, 6, 7]
        store.close()


def test_blocks_and_headers_in_the_wrong_place_are_not_served(tmp_path: Path, image: bytes) -> None:
    path = tmp_path / "slab"
    for where, size in ((GEOMETRY.header, PAGE), (GEOMETRY.payload, BLOCK_BYTES)):
        changed = bytearray(image)
        a, b = where(1), where(2)
        changed[a : a + size], changed[b : b + size] = image[b : b + size], image[a : a + size]
        write_image(path, changed)
        store = open_disk(path)
        assert sorted(served(store)) == [0, 3, 4, 5, 6, 7]
        store.close()


def test_a_cut_file_serves_what_is_left(tmp_path: Path, image: bytes) -> None:
    """Cut at every kind of boundary and at random; what lies wholly before the cut is intact."""
    rng = random.Random(2)
    path = tmp_path / "slab"
    cuts = [rng.randrange(len(image)) for _ in range(100)]
    for slot in range(NUM_SLOTS):
        for edge in (GEOMETRY.header(slot), GEOMETRY.payload(slot), GEOMETRY.payload(slot) + BLOCK_BYTES):
            cuts += [edge - 1, edge, edge + 1]
    for cut in [1, 8, 16, 100, PAGE - 1, *cuts]:
        write_image(path, image[:cut])
        if cut < PAGE:
            with pytest.raises(StoreMismatch):
                open_disk(path)
            continue
        store = open_disk(path)
        expected = {s: uid(s) for s in range(NUM_SLOTS) if GEOMETRY.payload(s) + BLOCK_BYTES <= cut}
        assert dict(store.recover()).keys() == expected.keys()
        assert served(store) == expected
        put(store, NUM_SLOTS - 1, 77)  # extends the file again, over what was cut off
        expected[NUM_SLOTS - 1] = uid(77)
        store.close()
        store = open_disk(path)
        assert served(store) == expected
        store.close()


# ---- kill -9 --------------------------------------------------------------------------------------

KILL_SLOTS = 12
KILL_BYTES = 200_000
_IDLE = 2**62


def write_for_ever(path: Path, ledger: np.ndarray, first: int, ready: int) -> None:
    """Put and drop until killed. ledger[slot] = what the slot holds, what it is about to hold.

    A number is a block, -1 is nothing; _IDLE stands for no operation under way.
    """
    rng = random.Random(first)
    store = open_disk(path, KILL_SLOTS, KILL_BYTES)
    os.write(ready, b"!")
    for number in range(first, _IDLE):
        slot = rng.randrange(KILL_SLOTS)
        kind = rng.random()
        block, data = uid(number), content(uid(number), KILL_BYTES)
        ledger[slot, 1] = number if kind < 0.8 else -1
        if kind < 0.8:
            store.put(slot, record(number), data)
        elif kind < 0.9:
            store.put(slot, None, content(block, KILL_BYTES))
        else:
            store.drop(slot)
        ledger[slot, 0] = ledger[slot, 1]
        ledger[slot, 1] = _IDLE


def test_kill_9_loses_nothing_that_was_put_and_keeps_nothing_half_written(tmp_path: Path) -> None:
    """50 writers killed at random moments, each on the file that the one before it left."""
    path = tmp_path / "slab"
    rng = random.Random(3)
    shared = mmap.mmap(-1, KILL_SLOTS * 2 * 8)  # outlives the child
    ledger = np.frombuffer(shared, np.int64).reshape(KILL_SLOTS, 2)
    ledger[:] = -1, _IDLE
    interrupted = 0
    for number in range(50):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                write_for_ever(path, ledger, 1 + number * 10**6, writer)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)  # never back into the test run
        try:
            assert os.read(reader, 1) == b"!"
            time.sleep(rng.uniform(0.02, 0.05))
        finally:
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            os.close(reader)
            os.close(writer)
        assert os.WTERMSIG(status) == signal.SIGKILL, "the writer failed by itself"
        store = open_disk(path, KILL_SLOTS, KILL_BYTES)
        named = {slot: int.from_bytes(entry.uid[:8], "little") for slot, entry in store.recover()}
        assert sorted(served(store, KILL_BYTES)) == sorted(named), "a recovered block is damaged"
        for slot in range(KILL_SLOTS):
            held, coming = ledger[slot].tolist()
            found = named.get(slot, -1)
            if coming == _IDLE:
                assert found == held
            else:
                interrupted += 1
                assert found in (held, coming, -1)
            ledger[slot] = found, _IDLE
        store.close()
    assert interrupted > 0, "the test should catch a writer at work"


# ---- power loss -----------------------------------------------------------------------------------

Write = tuple[int, bytes]  # offset, data
SYNC: Write = (-1, b"")


def record_session(
    path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, *, durable: bool
) -> tuple[list[Write], list[tuple[int, dict[int, bytes]]]]:
    """Run random operations on the file.

    Returns every write and sync in order, and (writes so far, what the store should hold) after each
    operation.
    """
    log: list[Write] = []
    real_write, real_sync = os.pwrite, os.fdatasync

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        log.append((offset, bytes(data)))
        return real_write(fd, data, offset)

    def fdatasync(fd: int) -> None:
        log.append(SYNC)
        real_sync(fd)

    rng = random.Random(seed)
    store = open_disk(path, durable=durable)
    holds = {slot: uid(slot) for slot in range(NUM_SLOTS)}
    states = [(0, dict(holds))]
    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    for number in range(1000, 1012):
        slot = rng.randrange(4)
        if rng.random() < 0.75:
            put(store, slot, number)
            holds[slot] = uid(number)
        else:
            store.drop(slot)
            holds.pop(slot, None)
        states.append((len(log), dict(holds)))
    monkeypatch.undo()
    store.close()
    return log, states


def after_power_loss(image: bytes, log: list[Write], cut: int, rng: random.Random) -> bytearray:
    """What the disk may hold when the power fails after `cut` writes.

    Everything before the last sync is there. Of what came later each page is there or not, as of any of
    its writes, and one page may be torn between sectors.
    """
    result = bytearray(image)
    synced = max((i for i in range(cut) if log[i] == SYNC), default=0)
    pages: dict[int, list[bytes]] = {}
    current = bytearray(image)
    for index, (offset, data) in enumerate(log[:cut]):
        if offset < 0:
            continue
        current[offset : offset + len(data)] = data
        if index < synced:
            continue
        for page in range(offset // PAGE, -(-(offset + len(data)) // PAGE)):
            pages.setdefault(page, []).append(bytes(current[page * PAGE : (page + 1) * PAGE]))
    for offset, data in (entry for entry in log[:synced] if entry[0] >= 0):
        result[offset : offset + len(data)] = data
    torn = rng.choice([*pages, None])
    for page, versions in pages.items():
        start = page * PAGE
        old = bytes(result[start : start + PAGE])
        chosen = rng.choice([old, *versions])
        end = rng.randrange(0, PAGE, SECTOR) if page == torn else PAGE
        result[start : start + PAGE] = chosen[:end] + old[end:]
    return result


@pytest.mark.parametrize("durable", [False, True])
def test_a_power_loss_never_leaves_a_wrong_block(
    tmp_path: Path, image: bytes, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    """Pages in any order, old, new or torn. With durable, also nothing is lost and nothing comes back."""
    rng = random.Random(4)
    path = tmp_path / "slab"
    lost = 0
    for seed in range(5):
        write_image(path, image)
        log, states = record_session(path, monkeypatch, seed, durable=durable)
        for _ in range(60):
            cut = rng.randrange(len(log) + 1)
            write_image(path, after_power_loss(image, log, cut, rng))
            store = open_disk(path)
            named = {slot: entry.uid for slot, entry in store.recover()}
            good = served(store)
            store.close()
            lost += len(named) - len(good)
            if durable:
                before, after = next(
                    (a[1], b[1]) for a, b in pairwise([*states, (len(log) + 1, {})]) if cut < b[0]
                )
                assert good == named, "durable: whatever is named is whole"
                for slot in range(NUM_SLOTS):
                    allowed = {before.get(slot)}
                    if cut not in [count for count, _ in states] and before.get(slot) != after.get(slot):
                        allowed |= {None, after.get(slot)}
                    assert good.get(slot) in allowed
    assert durable or lost > 10, "the test should make pages arrive out of order"


def test_a_block_that_changes_while_the_store_is_open_is_lost_once_and_for_all(
    tmp_path: Path, image: bytes
) -> None:
    path = tmp_path / "slab"
    write_image(path, image)
    store = open_disk(path)
    with path.open("r+b") as file:
        file.seek(GEOMETRY.payload(3) + 17)
        file.write(b"\x00\x01\x02")
    out = np.zeros(BLOCK_BYTES, np.uint8)
    with pytest.raises(BlockLost, match="slot 3 is damaged"):
        store.get(3, out)
    with pytest.raises(BlockLost, match="slot 3 is empty"):
        store.get(3, out)
    assert 3 not in dict(store.recover())
    store.close()
