"""The format of a slab file: where things lie in it, and how its headers become bytes and back.

    0         file header, one page (4096 bytes)
    4096      segment 0: slots 0..1023
                  1024 slot headers, a page each       contiguous: recovery reads them at once
                  1024 payloads, padded to whole pages
    ...       segment 1: slots 1024..2047
    ...

    file header   "OctavoKV" | version u32 | crc u32 | block_bytes u64 | num_slots u64 | file id 16 B
                  | length u32, fingerprint | zeros            crc: CRC-32 of the page after it
    slot header   "OKVB" | crc u32 | slot u64 | payload crc u32 | uid | parent | model | adapter
                  | salt | tokens | zeros                      crc: CRC-32 of the page after it
    a field       length u32, bytes; the length of None is 2**32 - 1, so None and "" differ

Integers are in the machine's byte order, as tokens and payloads are; a file from the other kind of
machine shows as another version. Segments let num_slots change without moving a byte. A page that was
never written is a hole that reads as zeros: no header.

Owns layout and encoding; does no I/O.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import NamedTuple

from octavo.kv.errors import InvalidArgument
from octavo.kv.store import Record
from octavo.kv.types import TOKEN_BYTES, Scope

PAGE = 4096
SLOTS_PER_SEGMENT = 1024
FILE_MAGIC = b"OctavoKV"
SLOT_MAGIC = b"OKVB"
VERSION = 1
UID_BYTES = 16
MAX_FINGERPRINT = 256
"""Bytes. The file header's content then lies in one 512-byte sector, which a disk writes as a whole."""

_FILE_START = struct.Struct("=8sII")
_FILE_BODY = struct.Struct("=QQ16sI")
_SLOT_START = struct.Struct("=4sI")
_SLOT_BODY = struct.Struct("=QI")
_LENGTH = struct.Struct("=I")
_NONE = 2**32 - 1
_NUM_FIELDS = 6


@dataclass(frozen=True, slots=True)
class Geometry:
    """Byte offsets in a slab file of `num_slots` blocks of `block_bytes` bytes."""

    num_slots: int
    block_bytes: int

    @property
    def stride(self) -> int:
        """Bytes from one payload to the next: block_bytes in whole pages."""
        return -(-self.block_bytes // PAGE) * PAGE

    @property
    def segment_bytes(self) -> int:
        """Bytes of a whole segment."""
        return SLOTS_PER_SEGMENT * (PAGE + self.stride)

    @property
    def end(self) -> int:
        """The first byte after the last slot's payload."""
        return self.payload(self.num_slots - 1) + self.stride

    def header(self, slot: int) -> int:
        """Where the header of `slot` starts."""
        segment, index = divmod(slot, SLOTS_PER_SEGMENT)
        return PAGE + segment * self.segment_bytes + index * PAGE

    def payload(self, slot: int) -> int:
        """Where the payload of `slot` starts, on a page boundary."""
        segment, index = divmod(slot, SLOTS_PER_SEGMENT)
        return PAGE + segment * self.segment_bytes + SLOTS_PER_SEGMENT * PAGE + index * self.stride


class FileHeader(NamedTuple):
    """What the file header says. `file_id`: 16 random bytes, new each time a file is made."""

    block_bytes: int
    num_slots: int
    file_id: bytes
    fingerprint: bytes

    def seed(self) -> int:
        """What the CRC of this file's slot headers starts from.

        CRC-32 of equal bytes from different seeds always differs, so a page left over from an earlier
        file in the same place on the disk is never taken for one of this file's.
        """
        return zlib.crc32(self.file_id + self.fingerprint)


class Difference(NamedTuple):
    """A property of a file that is not as wanted, for a message."""

    what: str
    found: str
    wanted: str


def encode_file_header(header: FileHeader) -> bytes:
    """The file's first page. Raises InvalidArgument for a fingerprint over MAX_FINGERPRINT bytes."""
    if len(header.fingerprint) > MAX_FINGERPRINT:
        raise InvalidArgument(
            f"the fingerprint has {len(header.fingerprint)} bytes, at most {MAX_FINGERPRINT} fit: hash it"
        )
    body = _FILE_BODY.pack(header.block_bytes, header.num_slots, header.file_id, len(header.fingerprint))
    body = (body + header.fingerprint).ljust(PAGE - _FILE_START.size, b"\0")
    return _FILE_START.pack(FILE_MAGIC, VERSION, zlib.crc32(body)) + body


def open_file_header(page: bytes | bytearray, wanted: FileHeader) -> FileHeader | Difference:
    """Read a file's first page; the first thing that keeps its blocks from being used, where one does.

    num_slots and the file id may be others than `wanted`.
    """
    if page[: len(FILE_MAGIC)] != FILE_MAGIC or len(page) < _FILE_START.size:
        return Difference("magic", repr(bytes(page[: len(FILE_MAGIC)])), repr(FILE_MAGIC))
    _, version, crc = _FILE_START.unpack_from(page)
    if version != VERSION:
        return Difference("format version", str(version), str(VERSION))
    body = bytes(page[_FILE_START.size :])
    if len(page) != PAGE or zlib.crc32(body) != crc:
        return Difference("file header", "damaged", "intact")
    block_bytes, num_slots, file_id, length = _FILE_BODY.unpack_from(body)
    fingerprint = body[_FILE_BODY.size : _FILE_BODY.size + length]
    if fingerprint != wanted.fingerprint:
        return Difference("fingerprint", _show(fingerprint), _show(wanted.fingerprint))
    if block_bytes != wanted.block_bytes:
        return Difference("block_bytes", str(block_bytes), str(wanted.block_bytes))
    return FileHeader(block_bytes, num_slots, file_id, fingerprint)


def encode_slot_header(slot: int, record: Record, payload_crc: int, seed: int) -> bytes | None:
    """The page of `slot`, or None where the record does not fit in one.

    A page has room for 4020 bytes of tokens and of the scope's strings (UTF-8) together: 2996 bytes of
    strings with blocks of 256 tokens, 3956 with blocks of 16. Raises InvalidArgument for a record that
    no pool makes.
    """
    if len(record.uid) != UID_BYTES or len(record.parent) not in (0, UID_BYTES):
        raise InvalidArgument(
            f"uid has {UID_BYTES} bytes and parent {UID_BYTES} or none, got {len(record.uid)} "
            f"and {len(record.parent)}"
        )
    if not record.tokens or len(record.tokens) % TOKEN_BYTES:
        raise InvalidArgument(f"tokens are int32, {len(record.tokens)} bytes are no number of them")
    scope = record.scope
    strings = (_to_bytes(text) for text in (scope.model, scope.adapter, scope.salt))
    parts = [_SLOT_BODY.pack(slot, payload_crc)]
    for field in (record.uid, record.parent, *strings, record.tokens):
        parts += (_LENGTH.pack(_NONE),) if field is None else (_LENGTH.pack(len(field)), field)
    body = b"".join(parts)
    if len(body) > PAGE - _SLOT_START.size:
        return None
    body = body.ljust(PAGE - _SLOT_START.size, b"\0")
    return _SLOT_START.pack(SLOT_MAGIC, zlib.crc32(body, seed)) + body


def decode_slot_header(page: bytes, slot: int, seed: int) -> tuple[Record, int] | None:
    """The record and payload CRC on the page of `slot`; None unless every byte of it is as written."""
    body = page[_SLOT_START.size :]
    if _SLOT_START.unpack_from(page) != (SLOT_MAGIC, zlib.crc32(body, seed)):
        return None
    named, payload_crc = _SLOT_BODY.unpack_from(body)
    if named != slot:  # written to the wrong place
        return None
    # The checksum held, so the lengths are those that were packed.
    fields: list[bytes | None] = []
    offset = _SLOT_BODY.size
    for _ in range(_NUM_FIELDS):
        (length,) = _LENGTH.unpack_from(body, offset)
        offset += _LENGTH.size
        fields.append(None if length == _NONE else body[offset : offset + length])
        offset += 0 if length == _NONE else length
    uid, parent, model, adapter, salt, tokens = fields
    scope = Scope(_to_text(model) or "", _to_text(adapter), _to_text(salt))
    return Record(uid or b"", parent or b"", scope, tokens or b""), payload_crc


def _to_bytes(text: str | None) -> bytes | None:
    # A salt comes from a request's JSON, which can spell half a surrogate pair.
    return None if text is None else text.encode("utf-8", "surrogatepass")


def _to_text(data: bytes | None) -> str | None:
    return None if data is None else data.decode("utf-8", "surrogatepass")


def _show(fingerprint: bytes) -> str:
    return fingerprint.decode("utf-8", "backslashreplace")
