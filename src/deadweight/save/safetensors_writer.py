"""Safetensors written one tensor at a time: space for the header is reserved, and filled when the file is complete.

Why not a library: `safetensors.torch.save_file` takes all tensors of a file at once, so a whole shard would be in
memory.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from pathlib import Path
from threading import Condition, Thread
from types import TracebackType

import torch
from torch import Tensor

from deadweight.save.uncached_file import UncachedFile
from deadweight.source.checkpoint import DTYPES
from deadweight.source.type_aliases import JsonObject

NAMES = {dtype: name for name, dtype in DTYPES.items()}
SHARD = 5 << 30  # bytes per file, as the hub recommends
PER_TENSOR = 96  # bytes of header per tensor, besides its name
QUEUE = 64 << 20  # bytes that may wait to be written, before the next tensor is queued


class Background:
    """Runs jobs one after the other in a thread; the first error ends it, and is raised once."""

    def __init__(self, room: int = QUEUE) -> None:
        self.room, self.used = room, 0
        self.jobs: deque[tuple[Callable[[], None], int]] = deque()
        self.error: BaseException | None = None
        self.ended = False
        self.changed = Condition()
        self.thread: Thread | None = None

    def do(self, job: Callable[[], None], size: int = 0) -> None:
        """Queue a job that holds `size` bytes; wait while the queued jobs hold too many."""
        with self.changed:
            if self.thread is None:
                self.thread = Thread(target=self.work, name="deadweight-writer", daemon=True)
                self.thread.start()
            self.changed.wait_for(lambda: self.ended or self.used < self.room)
            self.jobs.append((job, size))
            self.used += size
            self.changed.notify_all()
        if self.ended:
            self.finish()

    def work(self) -> None:
        while (job := self.next_job()) is not None:
            try:
                job[0]()
            except BaseException as error:  # noqa: BLE001 - raised by `do` or `finish`
                self.error = error
            with self.changed:
                self.used -= job[1]
                self.ended = self.ended or self.error is not None
                self.changed.notify_all()

    def next_job(self) -> tuple[Callable[[], None], int] | None:
        with self.changed:
            self.changed.wait_for(lambda: self.ended or bool(self.jobs))
            return self.jobs.popleft() if self.jobs and self.error is None else None

    def finish(self) -> None:
        """Wait until all jobs are done; raise the first error."""
        self.join()
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def stop(self) -> None:
        """Drop the jobs that wait."""
        with self.changed:
            self.jobs.clear()
        self.join()

    def join(self) -> None:
        with self.changed:
            self.ended = True
            self.changed.notify_all()
        if self.thread is not None:
            self.thread.join()


class Shard:
    """One file under construction."""

    def __init__(self, path: Path, room: int, background: Background) -> None:
        self.path, self.room, self.background = path, (room + 7) // 8 * 8, background
        self.file = UncachedFile(path)
        self.header: JsonObject = {"__metadata__": {"format": "pt"}}
        self.size = 0
        blank = memoryview(self.room.to_bytes(8, "little") + b" " * self.room)
        background.do(lambda: self.file.write(blank))

    def add(self, name: str, tensor: Tensor) -> None:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        end = self.size + flat.numel()
        self.header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self.size, end],
        }
        self.background.do(lambda: self.file.write(flat.numpy().data), flat.numel())
        self.size = end

    def fits(self, name: str) -> bool:
        used = len(json.dumps(self.header)) + len(json.dumps(name)) + PER_TENSOR
        return used < self.room

    def close(self) -> None:
        """Queue the completion of the file: its header, and fsync."""
        self.background.do(self.complete)

    def complete(self) -> None:
        text = json.dumps(self.header, separators=(",", ":")).encode()
        assert len(text) <= self.room
        self.file.complete(8, text.ljust(self.room))


class Writer:
    """Writes a checkpoint into one file, or into several with an index. A thread writes while the next tensor is made.

    As a context manager: after an error, queued tensors are dropped and the thread has ended.
    """

    def __init__(self, folder: Path, room: int, limit: int = SHARD) -> None:
        self.folder, self.room, self.limit = folder, room, limit
        self.background = Background()
        self.shards: list[Shard] = []
        self.where: dict[str, int] = {}
        self.numbers = 0

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.background.stop()
        for shard in self.shards:
            shard.file.close()

    def add(self, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.dtype.itemsize
        full = self.shards and (self.shards[-1].size + size > self.limit and self.shards[-1].size > 0)
        if not self.shards or full:
            if self.shards:
                self.shards[-1].close()
            path = self.folder / f"part-{len(self.shards)}.safetensors"
            self.shards.append(Shard(path, self.room, self.background))
        self.shards[-1].add(name, tensor)
        self.where[name] = len(self.shards) - 1
        if tensor.is_floating_point():
            self.numbers += tensor.numel()

    @property
    def bytes(self) -> int:
        return sum(s.size for s in self.shards)

    def close(self) -> None:
        """Wait until all is on disk, rename the files, and write the index if there are several."""
        if self.shards:
            self.shards[-1].close()
        self.background.finish()
        total = len(self.shards)
        if total == 1:
            self.shards[0].path.rename(self.folder / "model.safetensors")
            return
        names = [f"model-{i + 1:05}-of-{total:05}.safetensors" for i in range(total)]
        for shard, name in zip(self.shards, names, strict=True):
            shard.path.rename(self.folder / name)
        index = {
            "metadata": {"total_size": self.bytes},
            "weight_map": {name: names[i] for name, i in sorted(self.where.items())},
        }
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
