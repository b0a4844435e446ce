"""A store in one file that outlives the process, however the process ends.

    put     1  zero the slot's header      nothing names the slot
            2  write the payload           may stop anywhere: still nothing names it
            3  write the header            record, CRC of the payload, CRC of the header itself

    memory  crc    [num_slots] int64       CRC-32 of the payload, -1: empty
            named  [num_slots] bool        the header on disk may be a good one

slab.py draws the file. What is promised, and when:

  - Always: get fills `out` with exactly the bytes last put, or raises BlockLost; every payload is checked
    every time. recover names only slots whose header is as it was written.
  - The process dies (kill -9, a crash): the kernel keeps the writes in the order they were made, so every
    put that returned is recovered, and a put that was cut short is recovered whole or not at all.
  - The power fails: the kernel may have written pages back in any order. With durable=False any block may
    be lost; one whose header arrived without all of its payload is named by recover and refused by get.
    With durable=True each step above is on the disk before the next one starts: the promise is that of
    process death, and a dropped block stays dropped. It costs an fdatasync per step, often milliseconds.

CRC-32 and not a cryptographic hash: it stands against accidents, not against somebody who can write the
file, who could write matching hashes too. A damaged payload passes with probability 2**-32. zlib's runs at
4 GB/s where blake2b and sha256 run at 0.8 and 1.0, so a get costs its read and little more.

The file holds the prompts' tokens, their KV, and the tenants' salts in clear. Its mode is 0600. Dropping a
block zeroes its header (tokens and salt); its payload stays until another takes the slot.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from octavo.engine.tiers.checks import check_buffer, check_size, check_slot
from octavo.engine.tiers.errors import StoreClosed, StoreMismatch
from octavo.engine.tiers.slab import (
    PAGE,
    SLOT_MAGIC,
    SLOTS_PER_SEGMENT,
    FileHeader,
    Geometry,
    decode_slot_header,
    encode_file_header,
    encode_slot_header,
    open_file_header,
)
from octavo.engine.tiers.slabfile import open_locked, read_into, store_error, sync_directory, write_all
from octavo.kv.errors import InvalidArgument
from octavo.kv.store import BlockLost, Bytes, Record

SLAB_NAME = "octavo-kv.slab"
_EMPTY = -1
_NO_HEADER = bytes(PAGE)
_MAGIC_WORD = np.frombuffer(SLOT_MAGIC, np.uint32)[0]
_MAX_FILE = 2**62


class DiskStore:
    """Blocks in a file, `num_slots` of `block_bytes` bytes each. See the module for what is promised.

    The file grows as slots are used, to num_slots x (block_bytes + 4096) and at most 4 MB more. A record
    whose scope is too long for a header (2996 bytes of strings or more, see slab.encode_slot_header) is
    kept like one without a record: served until close(), not recovered; `too_long` counts these. The
    prefix of a prompt shares its scope, so no block is recovered without its ancestors for that reason.
    One thread calls it.
    """

    def __init__(
        self,
        path: Path | str,
        num_slots: int,
        block_bytes: int,
        fingerprint: bytes | str,
        *,
        durable: bool = False,
        reset_on_mismatch: bool = False,
    ) -> None:
        """Open or create the file at `path`, or `octavo-kv.slab` in `path` where that is a directory.

        fingerprint: at most 256 bytes, compared exactly. A file made for more or fewer slots is taken
        over: growing keeps all blocks, shrinking those in the slots that remain. A file of another
        format version, fingerprint or block size, or with a damaged file header, is refused with
        StoreMismatch; with reset_on_mismatch it is emptied instead. A file that does not start as a slab
        does is refused even then, for it may be anybody's. Raises also StoreLocked, StoreError,
        StoreFull and InvalidArgument. Cost: reads and checks 4096 bytes per slot, about 10 us each.
        """
        check_size("num_slots", num_slots, 2**31 - 1)
        check_size("block_bytes", block_bytes, 2**40)
        self.num_slots = num_slots
        self.block_bytes = block_bytes
        self.durable = durable
        self.too_long = 0
        given = Path(path).expanduser()
        self.path = given / SLAB_NAME if given.is_dir() else given
        self._geometry = Geometry(num_slots, block_bytes)
        if self._geometry.end > _MAX_FILE:
            raise InvalidArgument(f"{num_slots} blocks of {block_bytes} bytes are too many for one file")
        wanted = fingerprint.encode() if isinstance(fingerprint, str) else fingerprint
        fresh = FileHeader(block_bytes, num_slots, os.urandom(16), wanted)
        encode_file_header(fresh)  # refuses a long fingerprint before a file is made
        self._fd = open_locked(self.path)
        try:
            header = self._adopt(fresh, reset_on_mismatch) or self._create(fresh)
            os.fchmod(self._fd, 0o600)
            self._seed = header.seed()
            self._crc = np.full(num_slots, _EMPTY, np.int64)
            self._named = np.zeros(num_slots, np.bool_)
            size = os.fstat(self._fd).st_size
            for slot, _, crc in self._scan():
                if self._geometry.payload(slot) + block_bytes <= size:
                    self._crc[slot] = crc
        except OSError as error:
            self.close()
            raise store_error(error, self.path, "opening it") from error
        except BaseException:
            self.close()
            raise

    def put(self, slot: int, record: Record | None, data: Bytes) -> None:
        """Keep `data` (block_bytes uint8) in `slot`; with a record it is recovered after a restart.

        Raises StoreFull when the disk is, StoreError when it fails; the slot is then empty and the
        store usable. Raises InvalidArgument and StoreClosed, which change nothing. Cost: a checksum and
        a write of the block, and at most two of 4096 bytes; with `durable`, two or three fdatasyncs.
        """
        self._check(slot)
        check_buffer(data, self.block_bytes)
        crc = zlib.crc32(data.data)
        page = None
        if record is not None:
            page = encode_slot_header(slot, record, crc, self._seed)
            self.too_long += page is None
        try:
            self._forget(slot)
            write_all(self._fd, data.data, self._geometry.payload(slot))
            if page is not None:
                self._sync()
                self._named[slot] = True
                write_all(self._fd, page, self._geometry.header(slot))
                self._sync()
        except OSError as error:
            self._try_forget(slot)
            raise store_error(error, self.path, f"writing slot {slot}") from error
        self._crc[slot] = crc

    def get(self, slot: int, out: Bytes) -> None:
        """Fill `out` (block_bytes uint8) with the bytes last put in `slot`.

        Raises BlockLost where they are gone, damaged or cannot be read; the slot is then empty, and `out`
        may hold anything. Raises InvalidArgument and StoreClosed. Cost: a read and a checksum of the
        block.
        """
        self._check(slot)
        check_buffer(out, self.block_bytes, writeable=True)
        wanted = int(self._crc[slot])
        if wanted == _EMPTY:
            raise BlockLost(f"{self.path}: slot {slot} is empty")
        try:
            count = read_into(self._fd, out.data, self._geometry.payload(slot))
        except OSError as error:
            self._try_forget(slot)
            raise BlockLost(f"{self.path}: slot {slot} cannot be read: {error.strerror}") from error
        found = zlib.crc32(out.data)
        if count < self.block_bytes or found != wanted:
            self._try_forget(slot)
            raise BlockLost(
                f"{self.path}: slot {slot} is damaged: {count} of {self.block_bytes} bytes, CRC {found:08x}, "
                f"{wanted:08x} was written"
            )

    def drop(self, slot: int) -> None:
        """Forget what `slot` holds and zero its header.

        Raises StoreError when the disk fails: the slot is empty, but a restart may recover it, intact.
        Raises InvalidArgument and StoreClosed. Cost: one write of 4096 bytes, none for a slot without a
        header; with `durable`, an fdatasync.
        """
        self._check(slot)
        try:
            self._forget(slot)
        except OSError as error:
            raise store_error(error, self.path, f"dropping slot {slot}") from error

    def recover(self) -> Iterator[tuple[int, Record]]:
        """Yield (slot, record) for each slot with an intact header, in slot order.

        Payloads are not read here; get checks them. One uid may come twice, where the process died after
        a block was put in its new slot and before it was dropped from the old. Do not put while
        iterating; drop is fine. Raises StoreClosed and StoreError. Cost: as for opening.
        """
        self._check(0)
        try:
            for slot, record, crc in self._scan():
                if self._crc[slot] == crc:  # not so where it was dropped, or its payload is cut off
                    yield slot, record
        except OSError as error:
            raise store_error(error, self.path, "reading its headers") from error

    def close(self) -> None:
        """Close the file and let go of its lock. A second call does nothing.

        Does not wait for the disk: the kernel writes back what was put without `durable`.
        """
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    # ---- the file header ------------------------------------------------------------------------

    def _adopt(self, fresh: FileHeader, reset: bool) -> FileHeader | None:
        """Take over what the file holds: its header, or None where it is to be made anew."""
        page = bytearray(PAGE)
        page = page[: read_into(self._fd, memoryview(page), 0)]
        if not page:
            return None
        header = open_file_header(page, fresh)
        if isinstance(header, FileHeader):
            return self._resize(header)
        # Emptying is for our own files only: a mistyped path must not cost somebody their data.
        if reset and header.what != "magic":
            return None
        raise StoreMismatch(
            f"{self.path} holds nothing that can be used here: its {header.what} is {header.found}, this "
            f"engine wants {header.wanted}. Give another path, or delete the file"
            + ("" if header.what == "magic" else ", or set reset_on_mismatch to empty it"),
            what=header.what,
            found=header.found,
            wanted=header.wanted,
        )

    def _create(self, header: FileHeader) -> FileHeader:
        # A crash between the two leaves an empty file, which the next start takes for a new one.
        os.ftruncate(self._fd, 0)
        write_all(self._fd, encode_file_header(header), 0)
        os.fsync(self._fd)
        sync_directory(self.path.parent)
        return header

    def _resize(self, header: FileHeader) -> FileHeader:
        if header.num_slots > self.num_slots:
            # The headers that are cut off but stay inside the last segment's table would come back to
            # life when the file grows again, and by then name blocks that the pool gave up.
            table_end = -(-self.num_slots // SLOTS_PER_SEGMENT) * SLOTS_PER_SEGMENT
            for slot in range(self.num_slots, min(table_end, header.num_slots)):
                write_all(self._fd, _NO_HEADER, self._geometry.header(slot))
        if header.num_slots != self.num_slots:
            header = header._replace(num_slots=self.num_slots)
            write_all(self._fd, encode_file_header(header), 0)
            os.fsync(self._fd)
        # Also where nothing changed: an earlier shrinking may have been cut short right here.
        if os.fstat(self._fd).st_size > self._geometry.end:
            os.ftruncate(self._fd, self._geometry.end)
        return header

    # ---- slot headers ---------------------------------------------------------------------------

    def _scan(self) -> Iterator[tuple[int, Record, int]]:
        """Yield slot, record and payload CRC for each intact header; one read per segment."""
        for first in range(0, self.num_slots, SLOTS_PER_SEGMENT):
            count = min(SLOTS_PER_SEGMENT, self.num_slots - first)
            table = np.zeros((count, PAGE), np.uint8)
            if not read_into(self._fd, table.reshape(-1).data, self._geometry.header(first)):
                return  # the file ends before this segment
            marked = table.view(np.uint32)[:, 0] == _MAGIC_WORD
            self._named[first : first + count] |= marked
            for index in np.flatnonzero(marked).tolist():
                found = decode_slot_header(table[index].tobytes(), first + index, self._seed)
                if found is not None:
                    yield first + index, *found

    def _forget(self, slot: int) -> None:
        # Memory first: whatever the disk does, this slot is not served again.
        self._crc[slot] = _EMPTY
        if self._named[slot]:
            write_all(self._fd, _NO_HEADER, self._geometry.header(slot))
            self._sync()
            self._named[slot] = False

    def _try_forget(self, slot: int) -> None:
        # Where this fails too, `named` stays set and the next put or drop tries again. After a restart
        # the payload's checksum decides.
        with contextlib.suppress(OSError):
            self._forget(slot)

    def _sync(self) -> None:
        if self.durable:
            os.fdatasync(self._fd)

    def _check(self, slot: int) -> None:
        if self._fd < 0:
            raise StoreClosed(f"the store at {self.path} is closed")
        check_slot(slot, self.num_slots)
