"""Opening a slab file so that nobody else can have it, and reading and writing all of what was asked.

Owns the descriptor's rules: a regular file of this user's, not followed through a link, locked, mode
0600; whole reads and writes; errno to typed error. Knows nothing of what is in the file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

from octavo.engine.tiers.errors import StoreError, StoreFull, StoreLocked

# EFBIG: the file system or a limit of the process ends there, which for us is the same as a full disk.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def open_locked(path: Path) -> int:
    """Open `path` for reading and writing, create it if it is not there, and take its lock.

    The lock ends with the process, however that ends. Programs that this one starts do not inherit the
    descriptor; a child made by fork alone shares it, and the lock lasts as long as either. Raises
    StoreLocked where somebody has it, StoreError for what is not a plain file of this user's that nobody
    else can write to.
    """
    try:
        # O_NONBLOCK: where the path turns out to be a pipe or a device, do not wait for its other end.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        hint = ": it is a symbolic link, give the path that it leads to" if error.errno == errno.ELOOP else ""
        raise StoreError(f"{path} cannot be opened{hint}: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise StoreError(f"{path} is not a regular file; KV is kept in a file of its own")
        if status.st_uid != os.geteuid():
            raise StoreError(f"{path} belongs to user {status.st_uid}, this process is user {os.geteuid()}")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise StoreError(
                f"{path} can be written by others (mode {stat.S_IMODE(status.st_mode):o}): whatever they put "
                "there would be served; delete it, or set mode 600 if you trust what it holds"
            )
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise StoreLocked(
                f"{path} is in use by another process or engine: give each its own path, or end that one"
            ) from error
        raise StoreError(f"{path} cannot be locked: {error.strerror}") from error
    except StoreError:
        os.close(fd)
        raise
    return fd


def read_into(fd: int, out: memoryview, offset: int) -> int:
    """Fill `out` from `offset`; return the bytes read, fewer only at the end of the file."""
    done = 0
    while done < len(out):
        count = os.preadv(fd, [out[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at `offset`. Raises OSError; what was written by then stays."""
    view = memoryview(data)
    while len(view):
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


def sync_directory(path: Path) -> None:
    """Make the names in the directory `path` last through a power loss."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def store_error(error: OSError, path: Path, doing: str) -> StoreError:
    """The typed error for `error`, to be raised from it."""
    if error.errno in _FULL:
        return StoreFull(
            f"{path}: no room while {doing} ({error.strerror}): free space there, or lower the disk tier's "
            "number of blocks"
        )
    return StoreError(f"{path}: {doing} failed: {error.strerror}")
