"""The slab file: who may open it, what it refuses, how it grows and shrinks, and a full disk."""

from __future__ import annotations

import errno
import os
import resource
import stat
import struct
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from octavo.engine.tiers import StoreError, StoreFull, StoreLocked, StoreMismatch
from octavo.engine.tiers.disk import SLAB_NAME
from octavo.engine.tiers.slab import PAGE, SLOTS_PER_SEGMENT, Geometry
from octavo.kv.errors import InvalidArgument
from octavo.kv.store import Record
from octavo.kv.types import Scope
from tests.engine.tiers.helpers import BLOCK_BYTES, content, get, open_disk, put, record, served, uid


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "slab"


def filled(path: Path, num_slots: int = 8) -> None:
    """Make a file with a block in every slot."""
    store = open_disk(path, num_slots)
    for slot in range(num_slots):
        put(store, slot, slot)
    store.close()


# ---- what the file says ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scope",
    [
        Scope(),
        Scope("", "", ""),
        Scope("", None, ""),
        Scope("", "", None),
        Scope("m", "a", "s"),
        Scope("ma", None, "s"),
        Scope("m", "as", None),
        Scope("模型", "á\0b", "\ud800 half a pair"),
        Scope("x" * 900, "y" * 900, "z" * 900),
    ],
)
def test_records_come_back_exactly(path: Path, scope: Scope) -> None:
    """None and "" differ, strings do not run into each other, and any text that JSON can spell is kept."""
    for num_tokens in (1, 16, 256):
        store = open_disk(path)
        store.put(0, record(0, scope, num_tokens), content(uid(0)))
        store.put(1, record(1, scope, num_tokens), content(uid(1)))
        store.close()
        store = open_disk(path)
        assert list(store.recover()) == [(i, record(i, scope, num_tokens)) for i in (0, 1)]
        store.close()


@pytest.mark.parametrize(("num_tokens", "most"), [(16, 3956), (256, 2996)])
def test_a_record_too_long_for_a_header_is_served_but_not_recovered(
    path: Path, num_tokens: int, most: int
) -> None:
    store = open_disk(path)
    store.put(0, record(0, Scope(salt="s" * most), num_tokens), content(uid(0)))
    assert store.too_long == 0
    store.put(1, record(1, Scope(salt="s" * (most + 1)), num_tokens), content(uid(1)))
    assert store.too_long == 1
    assert get(store, 1) is not None
    store.close()
    store = open_disk(path)
    assert [slot for slot, _ in store.recover()] == [0]
    store.close()


@pytest.mark.parametrize(
    "bad",
    [
        Record(b"short", b"", Scope(), b"1234"),
        Record(uid(1), b"short", Scope(), b"1234"),
        Record(uid(1), b"", Scope(), b""),
        Record(uid(1), b"", Scope(), b"12345"),
    ],
)
def test_a_record_that_no_pool_makes_is_refused_and_changes_nothing(path: Path, bad: Record) -> None:
    store = open_disk(path)
    put(store, 0, 5)
    with pytest.raises(InvalidArgument):
        store.put(0, bad, content(uid(6)))
    assert served(store) == {0: uid(5)}
    store.close()


def test_payloads_and_headers_lie_on_pages_and_do_not_meet() -> None:
    for block_bytes in (1, PAGE, PAGE + 1, 100_000):
        geometry = Geometry(2 * SLOTS_PER_SEGMENT + 5, block_bytes)
        spans = [(0, PAGE)]
        for slot in range(geometry.num_slots):
            spans.append((geometry.header(slot), PAGE))
            spans.append((geometry.payload(slot), block_bytes))
        spans.sort()
        assert all(start % PAGE == 0 for start, _ in spans)
        assert all(start + size <= after for (start, size), (after, _) in pairwise(spans))
        assert spans[-1][0] + spans[-1][1] <= geometry.end


def test_recovering_thousands_of_slots_takes_well_under_a_second(path: Path) -> None:
    store = open_disk(path, 5000, 16)
    for slot in range(5000):
        put(store, slot, slot, 16)
    store.close()
    start = time.perf_counter()
    store = open_disk(path, 5000, 16)
    assert sum(1 for _ in store.recover()) == 5000
    assert time.perf_counter() - start < 1
    store.close()


# ---- who may open it ------------------------------------------------------------------------------


def test_a_directory_gets_a_file_of_the_documented_name(tmp_path: Path) -> None:
    store = open_disk(tmp_path)
    assert store.path == tmp_path / SLAB_NAME
    assert store.path.is_file()
    store.close()


def test_only_the_owner_may_read_it(path: Path) -> None:
    old = os.umask(0)
    try:
        filled(path)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    open_disk(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_that_others_can_write_is_refused(path: Path) -> None:
    filled(path)
    path.chmod(0o620)
    with pytest.raises(StoreError, match="written by others"):
        open_disk(path)


def test_a_file_of_another_user_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(path)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(StoreError, match="belongs to user"):
        open_disk(path)


def test_a_link_a_pipe_and_a_missing_directory_are_refused(tmp_path: Path) -> None:
    filled(tmp_path / "slab")
    (tmp_path / "link").symlink_to(tmp_path / "slab")
    with pytest.raises(StoreError, match="symbolic link"):
        open_disk(tmp_path / "link")
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(StoreError, match="pipe is not a regular file"):
        open_disk(tmp_path / "pipe")
    with pytest.raises(StoreError, match="nowhere"):
        open_disk(tmp_path / "nowhere" / "slab")


def test_two_stores_cannot_have_one_file(path: Path) -> None:
    """In one process or in two: the second is told which path, and gets it when the first is done."""
    store = open_disk(path)
    with pytest.raises(StoreLocked, match=str(path)):
        open_disk(path)
    child = os.fork()
    if child == 0:
        try:
            open_disk(path)
        except StoreLocked:
            os._exit(42)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    put(store, 0, 1)
    store.close()
    store = open_disk(path)
    assert served(store) == {0: uid(1)}
    store.close()


def test_a_refused_file_is_unlocked_again(path: Path) -> None:
    filled(path)
    for _ in range(3):
        with pytest.raises(StoreMismatch):
            open_disk(path, fingerprint="other")
    open_disk(path).close()


# ---- a file of something else ---------------------------------------------------------------------


def other_version(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(8)
        file.write(struct.pack("=I", 7))


def damage(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(20)
        file.write(b"\xff")


MISMATCHES = [
    ("fingerprint", lambda path: None, {"fingerprint": "ffff"}, ("0123abcd", "ffff")),
    ("block_bytes", lambda path: None, {"block_bytes": 6000}, ("5000", "6000")),
    ("format version", other_version, {}, ("7", "1")),
    ("file header", damage, {}, ("damaged", "intact")),
]


@pytest.mark.parametrize(("what", "change", "options", "values"), MISMATCHES)
def test_another_kind_of_file_is_refused_and_left_alone(
    path: Path, what: str, change: Callable[[Path], None], options: dict, values: tuple[str, str]
) -> None:
    """The error has both values and says what to do."""
    filled(path)
    change(path)
    before = path.read_bytes()
    with pytest.raises(StoreMismatch) as caught:
        open_disk(path, **options)
    assert (caught.value.what, caught.value.found, caught.value.wanted) == (what, *values)
    for word in (str(path), what, *values, "reset_on_mismatch"):
        assert word in str(caught.value)
    assert path.read_bytes() == before


@pytest.mark.parametrize(("what", "change", "options", "values"), MISMATCHES)
def test_on_request_it_is_emptied(
    path: Path, what: str, change: Callable[[Path], None], options: dict, values: tuple[str, str]
) -> None:
    filled(path)
    change(path)
    store = open_disk(path, reset_on_mismatch=True, **options)
    assert list(store.recover()) == []
    assert all(get(store, slot, store.block_bytes) is None for slot in range(8))
    put(store, 1, 1, store.block_bytes)
    store.close()
    store = open_disk(path, **options)
    assert served(store, store.block_bytes) == {1: uid(1)}
    store.close()


@pytest.mark.parametrize("data", [b"x", b"my thesis\n" * 1000, bytes(3 * PAGE)])
def test_somebody_elses_file_is_never_touched(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    path.chmod(0o640)
    for reset in (False, True):
        with pytest.raises(StoreMismatch, match="another path"):
            open_disk(path, reset_on_mismatch=reset)
    assert path.read_bytes() == data
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_an_empty_file_is_a_new_one(path: Path) -> None:
    """A crash may leave one behind; so does somebody who makes the file first to set its owner."""
    path.touch(0o600)
    filled(path)
    store = open_disk(path)
    assert len(served(store)) == 8
    store.close()


def test_a_fingerprint_is_text_or_bytes_and_not_too_long(path: Path) -> None:
    open_disk(path, fingerprint="f" * 256).close()
    open_disk(path, fingerprint=b"f" * 256).close()
    with pytest.raises(InvalidArgument, match="257"):
        open_disk(path, fingerprint="f" * 257)


def test_headers_of_an_earlier_file_are_not_good_in_this_one(path: Path) -> None:
    """A file system may show old pages after a power loss; they belong to another file id."""
    filled(path)
    old = path.read_bytes()
    path.unlink()
    open_disk(path).close()
    with path.open("r+b") as file:
        file.seek(PAGE)
        file.write(old[PAGE:])
    store = open_disk(path)
    assert list(store.recover()) == []
    store.close()


# ---- another number of slots ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"), [(8, 12), (8, 3), (8, 1030), (1030, 8), (1030, 1026), (2050, 1024)]
)
def test_another_number_of_slots_keeps_what_fits(path: Path, before: int, after: int) -> None:
    """And growing back does not bring to life what shrinking cut off."""
    filled(path, before)
    kept = {slot: uid(slot) for slot in range(min(before, after))}
    store = open_disk(path, after)
    assert served(store) == kept
    assert path.stat().st_size <= Geometry(after, BLOCK_BYTES).end
    put(store, after - 1, 9999)
    store.close()
    kept[after - 1] = uid(9999)
    most = max(before, after)
    store = open_disk(path, most)
    put(store, most - 1, 8888)  # the file is as long again as before
    store.close()
    kept[most - 1] = uid(8888)
    store = open_disk(path, most)
    assert {slot: entry.uid for slot, entry in store.recover()} == kept
    assert served(store) == kept
    store.close()


# ---- a disk that is full or fails -----------------------------------------------------------------


@pytest.mark.parametrize("failing_write", [0, 1, 2])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_failed_write_empties_the_slot_and_nothing_else(
    path: Path, monkeypatch: pytest.MonkeyPatch, failing_write: int, code: int
) -> None:
    """Whichever of a put's three writes fails, half way through."""
    filled(path)
    store = open_disk(path)
    real, calls = os.pwrite, 0

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls - 1 == failing_write:
            return real(fd, data[: len(data) // 2], offset)
        if calls - 1 == failing_write + 1:
            raise OSError(code, os.strerror(code))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(StoreError, match=f"{path}.*slot 3") as caught:
        put(store, 3, 50)
    assert isinstance(caught.value, StoreFull) == (code != errno.EIO)
    assert isinstance(caught.value.__cause__, OSError)
    monkeypatch.undo()
    expected = {slot: uid(slot) for slot in range(8) if slot != 3}
    assert get(store, 3) is None
    assert served(store) == expected
    store.close()
    store = open_disk(path)
    assert served(store) == expected
    put(store, 3, 51)
    assert served(store) == expected | {3: uid(51)}
    store.close()


def test_a_disk_that_takes_nothing_at_all_never_serves_the_wrong_block(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old header cannot be zeroed, so a restart may find the old block, which is intact."""
    filled(path)
    store = open_disk(path)

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(StoreFull):
        put(store, 3, 50)
    with pytest.raises(StoreFull):
        store.drop(4)
    assert get(store, 3) is None
    assert get(store, 4) is None
    assert sorted(served(store)) == [0, 1, 2, 5, 6, 7]
    monkeypatch.undo()
    store.drop(4)
    store.close()
    store = open_disk(path)
    assert served(store) == {slot: uid(slot) for slot in range(8) if slot != 4}
    store.close()


def test_a_real_limit_on_the_size_of_the_file(path: Path) -> None:
    store = open_disk(path)
    put(store, 0, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (Geometry(8, BLOCK_BYTES).payload(2) + 100, hard))
    try:
        put(store, 1, 2)
        with pytest.raises(StoreFull, match="free space"):
            put(store, 2, 3)
        put(store, 0, 4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert served(store) == {0: uid(4), 1: uid(2)}
    store.close()


def test_a_block_that_cannot_be_read_is_lost(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(path)
    store = open_disk(path)

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, "bad sector")

    monkeypatch.setattr(os, "preadv", preadv)
    assert get(store, 2) is None
    monkeypatch.undo()
    assert get(store, 2) is None
    assert np.array_equal(get(store, 3), content(uid(3)))  # type: ignore[arg-type]
    store.close()
