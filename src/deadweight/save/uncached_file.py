"""A file that is written once from start to end, past the system's page cache where that is possible.

Copying gigabytes into the page cache takes most of the processor time of writing, and drops from it what other programs
read. Direct writing wants addresses, offsets and sizes in whole blocks: bytes are collected in one buffer first.
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

BUFFER = 8 << 20  # bytes that are written at a time; a multiple of the block size of every disk
STRIDE = 64 << 20  # bytes after which writing to disk is started, where the page cache is used
DIRECT = getattr(os, "O_DIRECT", 0)
REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)  # a file system that cannot write directly


class UncachedFile:
    """The file under construction. Each method either does all it says or raises OSError."""

    def __init__(self, path: Path) -> None:
        self.descriptor, self.direct = open_for_writing(path)
        self.buffer = mmap.mmap(-1, BUFFER)  # begins at a page
        self.filled = self.written = self.begun = 0  # bytes in the buffer; in the file; whose way to the disk has begun
        self.closed = False

    def write(self, data: memoryview) -> None:
        """Append bytes, one per entry of the view."""
        while data.nbytes:
            part = data[: BUFFER - self.filled]
            self.buffer[self.filled : self.filled + part.nbytes] = part
            self.filled += part.nbytes
            data = data[part.nbytes :]
            if self.filled == BUFFER:
                self.flush()

    def flush(self) -> None:
        """Write what is in the buffer; the last of it need not be a whole block, and goes through the cache."""
        if self.filled < BUFFER:
            self.use_cache()
        start = 0
        while start < self.filled:
            with memoryview(self.buffer) as whole, whole[start : self.filled] as rest:  # released if writing fails
                start += self.write_some(rest)
        self.filled = 0
        if not self.direct and self.written - self.begun >= STRIDE:
            begin_writing(self.descriptor, self.begun, self.written - self.begun)
            self.begun = self.written

    def write_some(self, data: memoryview) -> int:
        """Write the beginning of the data; a direct write that is refused or stops inside a block is the last one."""
        try:
            count = os.write(self.descriptor, data)
        except OSError as error:
            if not self.direct or error.errno not in REFUSED:
                raise
            self.use_cache()
            return 0
        self.written += count
        if count < data.nbytes:
            self.use_cache()
        return count

    def use_cache(self) -> None:
        if self.direct:
            import fcntl  # not on Windows, where nothing is written directly

            flags = fcntl.fcntl(self.descriptor, fcntl.F_GETFL)
            fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags & ~DIRECT)
            self.direct = False

    def complete(self, start: int, data: bytes) -> None:
        """Write the rest, then `data` over what stands at `start`, and wait until all is on disk."""
        self.flush()
        os.lseek(self.descriptor, start, os.SEEK_SET)
        while data:
            data = data[os.write(self.descriptor, data) :]
        os.fsync(self.descriptor)
        self.close()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            os.close(self.descriptor)
            self.buffer.close()


def open_for_writing(path: Path) -> tuple[int, bool]:
    """A new file, and whether it is written directly."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0)
    if DIRECT:
        try:
            return os.open(path, flags | DIRECT, 0o666), True
        except OSError as error:
            if error.errno not in REFUSED:
                raise
    return os.open(path, flags, 0o666), False


def begin_writing(descriptor: int, start: int, count: int) -> None:
    """Start writing cached pages to disk, without waiting: otherwise all of them are written at the final fsync."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, start, count, os.POSIX_FADV_DONTNEED)
