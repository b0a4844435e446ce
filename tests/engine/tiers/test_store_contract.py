"""What every Store does. A new store subclasses StoreContract and says how it is made."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.tiers import HostStore, StoreClosed
from octavo.kv.errors import InvalidArgument
from octavo.kv.store import BlockLost, Bytes, Store
from tests.engine.tiers.helpers import BLOCK_BYTES, content, get, open_disk, put, record, uid

NUM_SLOTS = 8
Factory = Callable[[], Store]


class StoreContract:
    """Tests of a store of NUM_SLOTS blocks of BLOCK_BYTES; `make` opens it, again after close()."""

    survives = False

    @pytest.fixture
    def make(self, tmp_path: Path) -> Factory:
        raise NotImplementedError

    @pytest.fixture
    def store(self, make: Factory) -> Store:
        return make()

    def test_a_block_comes_back_as_it_was_put(self, store: Store) -> None:
        for slot in range(NUM_SLOTS):
            put(store, slot, 100 + slot)
        for slot in reversed(range(NUM_SLOTS)):
            assert np.array_equal(get(store, slot), content(uid(100 + slot)))  # type: ignore[arg-type]
        store.close()

    def test_a_put_replaces_what_the_slot_held(self, store: Store) -> None:
        put(store, 3, 1)
        put(store, 3, 2)
        assert np.array_equal(get(store, 3), content(uid(2)))  # type: ignore[arg-type]
        store.close()

    def test_the_store_keeps_a_copy(self, store: Store) -> None:
        data = content(uid(1)).copy()
        store.put(0, record(1), data)
        data[:] = 0
        assert np.array_equal(get(store, 0), content(uid(1)))  # type: ignore[arg-type]
        store.close()

    def test_a_slot_without_a_record_is_served_until_the_store_closes(self, make: Factory) -> None:
        store = make()
        put(store, 5, 1)
        store.put(5, None, content(uid(2)))
        assert np.array_equal(get(store, 5), content(uid(2)))  # type: ignore[arg-type]
        assert list(store.recover()) == []
        store.close()
        store = make()
        assert list(store.recover()) == []
        assert get(store, 5) is None
        store.close()

    def test_what_was_never_put_is_lost(self, store: Store) -> None:
        with pytest.raises(BlockLost, match="slot 2"):
            store.get(2, np.zeros(BLOCK_BYTES, np.uint8))
        store.close()

    def test_what_was_dropped_is_lost(self, make: Factory) -> None:
        store = make()
        put(store, 2, 1)
        store.drop(2)
        store.drop(2)
        assert get(store, 2) is None
        assert list(store.recover()) == []
        store.close()
        store = make()
        assert get(store, 2) is None
        store.close()

    def test_recover_after_reopening(self, make: Factory) -> None:
        store = make()
        put(store, 6, 1)
        put(store, 0, 2)
        store.close()
        store = make()
        expected = [(0, record(2)), (6, record(1))] if self.survives else []
        assert list(store.recover()) == expected
        for slot, entry in expected:
            assert np.array_equal(get(store, slot), content(entry.uid))  # type: ignore[arg-type]
        store.close()

    @pytest.mark.parametrize("slot", [-1, NUM_SLOTS, 2**40])
    def test_a_slot_out_of_range_is_refused(self, store: Store, slot: int) -> None:
        data = np.zeros(BLOCK_BYTES, np.uint8)
        for call in (
            lambda: store.put(slot, record(1), data),
            lambda: store.get(slot, data),
            lambda: store.drop(slot),
        ):
            with pytest.raises(InvalidArgument, match="slot"):
                call()
        store.close()

    @pytest.mark.parametrize(
        "buffer",
        [
            np.zeros(BLOCK_BYTES - 1, np.uint8),
            np.zeros(BLOCK_BYTES + 1, np.uint8),
            np.zeros(0, np.uint8),
            np.zeros((2, BLOCK_BYTES // 2), np.uint8),
            np.zeros(BLOCK_BYTES, np.int8),
            np.zeros(2 * BLOCK_BYTES, np.uint8)[::2],
        ],
    )
    def test_a_wrong_buffer_is_refused_and_changes_nothing(self, store: Store, buffer: Bytes) -> None:
        put(store, 1, 7)
        with pytest.raises(InvalidArgument):
            store.put(1, record(8), buffer)
        with pytest.raises(InvalidArgument):
            store.get(1, buffer)
        assert np.array_equal(get(store, 1), content(uid(7)))  # type: ignore[arg-type]
        store.close()

    def test_get_refuses_a_buffer_that_cannot_be_filled(self, store: Store) -> None:
        put(store, 1, 7)
        with pytest.raises(InvalidArgument, match="writeable"):
            store.get(1, content(uid(7)))
        store.close()

    def test_a_closed_store_refuses(self, store: Store) -> None:
        store.close()
        store.close()
        data = np.zeros(BLOCK_BYTES, np.uint8)
        for call in (
            lambda: store.put(0, None, data),
            lambda: store.get(0, data),
            lambda: store.drop(0),
            lambda: list(store.recover()),
        ):
            with pytest.raises(StoreClosed):
                call()


class TestHostStore(StoreContract):
    @pytest.fixture
    def make(self, tmp_path: Path) -> Factory:
        return lambda: HostStore(NUM_SLOTS, BLOCK_BYTES)


class TestDiskStore(StoreContract):
    survives = True

    @pytest.fixture(params=[False, True], ids=["", "durable"])
    def make(self, tmp_path: Path, request: pytest.FixtureRequest) -> Factory:
        return lambda: open_disk(tmp_path / "slab", NUM_SLOTS, durable=request.param)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "unnamed", "drop", "get", "recover", "reopen"]),
        st.integers(0, NUM_SLOTS - 1),
    ),
    max_size=40,
)


@pytest.mark.parametrize("kind", ["host", "disk"])
@settings(max_examples=80, deadline=None)
@given(operations=OPERATIONS)
def test_any_order_of_calls_agrees_with_a_dictionary(kind: str, operations: list[tuple[str, int]]) -> None:
    """A store is a dictionary from slot to bytes; on disk, one whose named entries outlive it."""
    with tempfile.TemporaryDirectory() as folder:

        def make() -> Store:
            return HostStore(NUM_SLOTS, BLOCK_BYTES) if kind == "host" else open_disk(Path(folder))

        store, model = make(), {}
        for number, (name, slot) in enumerate(operations):
            if name == "put":
                put(store, slot, number)
                model[slot] = (number, True)
            elif name == "unnamed":
                store.put(slot, None, content(uid(number)))
                model[slot] = (number, False)
            elif name == "drop":
                store.drop(slot)
                model.pop(slot, None)
            elif name == "reopen":
                store.close()
                store = make()
                model = {s: entry for s, entry in model.items() if entry[1] and kind == "disk"}
            elif name == "recover":
                named = {s: record(n) for s, (n, is_named) in model.items() if is_named and kind == "disk"}
                assert dict(store.recover()) == named
            found = get(store, slot)
            assert (found is None) == (slot not in model)
            if found is not None:
                assert np.array_equal(found, content(uid(model[slot][0])))
        store.close()


@pytest.mark.parametrize(("num_slots", "block_bytes"), [(0, 1), (1, 0), (-1, 1), (2**31, 1), (True, 1)])
def test_sizes_out_of_range_are_refused(tmp_path: Path, num_slots: int, block_bytes: int) -> None:
    with pytest.raises(InvalidArgument):
        HostStore(num_slots, block_bytes)
    with pytest.raises(InvalidArgument):
        open_disk(tmp_path / "slab", num_slots, block_bytes)
    assert list(tmp_path.iterdir()) == []
