"""A file written past the page cache holds what was written, however the system takes it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from deadweight.save import uncached_file
from deadweight.save.uncached_file import UncachedFile

BLOCK = 4096
Write = Callable[[int, memoryview], int]


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uncached_file, "BUFFER", 2 * BLOCK)
    monkeypatch.setattr(uncached_file, "STRIDE", 3 * BLOCK)


def written(path: Path, sizes: list[int]) -> tuple[bytes, bytes]:
    """What was written, with its bytes 8 to 16 replaced at the end, and what the file holds."""
    wanted = os.urandom(sum(sizes))
    file, start = UncachedFile(path), 0
    for size in sizes:
        file.write(memoryview(wanted)[start : start + size])
        start += size
    file.complete(8, b"replaced")
    return wanted[:8] + b"replaced" + wanted[16:], path.read_bytes()


SIZES = [[16], [2 * BLOCK], [100, 2 * BLOCK, 1], [BLOCK] * 7, [0, 20 * BLOCK + 5], [3, 9 * BLOCK, 0, 9 * BLOCK - 3]]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_file_holds_what_was_written(tmp_path: Path, sizes: list[int]) -> None:
    wanted, found = written(tmp_path / "file", sizes)
    assert found == wanted


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_system_without_direct_writing_uses_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: list[int]
) -> None:
    monkeypatch.setattr(uncached_file, "DIRECT", 0)
    wanted, found = written(tmp_path / "file", sizes)
    assert found == wanted


def refuse(honest: Write, taken: int) -> Write:
    """A disk that refuses direct writing after so many writes: the first write that comes again is taken."""
    calls: list[int] = []

    def write(descriptor: int, data: memoryview) -> int:
        calls.append(1)
        if len(calls) == taken + 1:
            raise OSError(errno.EINVAL, "Invalid argument")
        return honest(descriptor, data)

    return write


def take_little(honest: Write, taken: int) -> Write:
    """A disk that takes only some bytes of one write, which are no whole block."""
    calls: list[int] = []

    def write(descriptor: int, data: memoryview) -> int:
        calls.append(1)
        if len(calls) != taken + 1:
            return honest(descriptor, data)
        return honest(descriptor, data[:10])

    return write


@pytest.mark.parametrize("fault", [refuse, take_little])
@pytest.mark.parametrize("taken", [0, 2])
def test_a_direct_write_that_is_refused_or_cut_short_goes_on_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Write, int], Write], taken: int
) -> None:
    if not uncached_file.DIRECT and fault is refuse:
        pytest.skip("no direct writing here, hence none that is refused")
    monkeypatch.setattr(uncached_file, "open_for_writing", as_if_direct)
    monkeypatch.setattr(uncached_file.os, "write", fault(os.write, taken))
    wanted, found = written(tmp_path / "file", [20 * BLOCK + 5])
    assert found == wanted


def as_if_direct(path: Path) -> tuple[int, bool]:
    """A file that counts as written directly, whatever its file system can do."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0), 0o666), True


def test_a_full_disk_is_an_error_and_no_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = UncachedFile(tmp_path / "file")
    monkeypatch.setattr(uncached_file.os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        file.write(memoryview(bytes(3 * BLOCK)))
    file.close()
    file.close()  # twice is no error
