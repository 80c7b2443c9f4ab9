"""Safetensors written one tensor at a time: the header is left open and filled in when the file is complete."""

from __future__ import annotations

import json
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
SHARD = 5 << 30  # bytes: what the hub likes
PER_TENSOR = 96  # bytes of header beside the name


class Shard:
    """One file under construction."""

    def __init__(self, path: Path, room: int) -> None:
        self.path, self.room = path, (room + 7) // 8 * 8
        self.file = path.open("wb")
        self.file.write(self.room.to_bytes(8, "little") + b" " * self.room)
        self.header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self.size = 0
        self.thread = ThreadPoolExecutor(1)
        self.pending: Future[Any] | None = None  # the last tensor, on its way to the file while the next is made

    def add(self, name: str, tensor: Tensor) -> None:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        self.header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self.size, self.size + flat.numel()],
        }
        self.wait()
        self.pending = self.thread.submit(self.file.write, flat.numpy().data)
        self.size += flat.numel()

    def wait(self) -> None:
        if self.pending is not None:
            self.pending.result()

    def fits(self, name: str) -> bool:
        used = len(json.dumps(self.header)) + len(json.dumps(name)) + PER_TENSOR
        return used < self.room

    def close(self) -> None:
        text = json.dumps(self.header, separators=(",", ":")).encode()
        assert len(text) <= self.room
        self.wait()
        self.thread.shutdown()
        self.file.seek(8)
        self.file.write(text.ljust(self.room))
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()


class Writer:
    """A checkpoint in one file or several, with the index that several need."""

    def __init__(self, folder: Path, room: int, limit: int = SHARD) -> None:
        self.folder, self.room, self.limit = folder, room, limit
        self.shards: list[Shard] = []
        self.where: dict[str, int] = {}
        self.numbers = 0

    def add(self, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.dtype.itemsize
        full = self.shards and (self.shards[-1].size + size > self.limit and self.shards[-1].size > 0)
        if not self.shards or full:
            if self.shards:
                self.shards[-1].close()
            self.shards.append(Shard(self.folder / f"part-{len(self.shards)}.safetensors", self.room))
        self.shards[-1].add(name, tensor)
        self.where[name] = len(self.shards) - 1
        if tensor.is_floating_point():
            self.numbers += tensor.numel()

    @property
    def bytes(self) -> int:
        return sum(s.size for s in self.shards)

    def close(self) -> None:
        """Give the files their names, and write the index of several."""
        if self.shards:
            self.shards[-1].close()
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
