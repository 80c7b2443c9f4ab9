"""The weights of a model, one at a time: from safetensors as they lie on disk, or from a module in memory."""

from __future__ import annotations

import json
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deadweight.errors import DeadweightError
from deadweight.source.files import check_header, weight_files
from deadweight.source.text import printable, reason

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
EVERY = slice(None)  # row
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Checkpoint(ABC):
    """Weights by the model's own state-dict names."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]: ...

    @abstractmethod
    def read(self, name: str, rows: slice = EVERY) -> Tensor: ...

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype: ...

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]: ...

    def outer(self, name: str) -> str:
        """The name under which the weight is stored in the file."""
        return name

    def __contains__(self, name: str) -> bool:
        return name in self.names

    @property
    def bytes(self) -> int:
        return sum(torch.Size(self.shape(n)).numel() * self.dtype(n).itemsize for n in self.names)


class ModuleCheckpoint(Checkpoint):
    """A module in memory."""

    def __init__(self, module: nn.Module) -> None:
        seen: dict[tuple[int, Any], str] = {}
        self.tensors: dict[str, Tensor] = {}
        for name, tensor in module.state_dict(keep_vars=True).items():
            key = (id(tensor), tensor.shape)
            if key not in seen:
                seen[key] = name
                self.tensors[name] = tensor.detach()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.tensors)

    def read(self, name: str, rows: slice = EVERY) -> Tensor:
        return self.tensors[name] if rows == EVERY else self.tensors[name][rows]

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)


class FileCheckpoint(Checkpoint):
    """Safetensors files of one folder; `prefix` is what the model puts before (or, with −, leaves out of) a name."""

    def __init__(self, folder: Path, prefix: str = "") -> None:
        self.folder, self.prefix = folder, prefix
        self.places: dict[str, tuple[Path, int, int]] = {}  # file, first byte, bytes
        self.slices: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for file in weight_files(folder):
            check_header(file)  # safetensors itself vouches for offsets and sizes
            self.add(file)

    def add(self, file: Path) -> None:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] not in DTYPES:
                raise DeadweightError(
                    f"{printable(name)} is stored as {entry['dtype']}; expected numbers in one of "
                    f"{', '.join(DTYPES)}: quantised weights cannot be rewritten exactly"
                )
            first, last = entry["data_offsets"]
            self.places[name] = (file, 8 + length + first, last - first)
            self.slices[name] = (DTYPES[entry["dtype"]], tuple(entry["shape"]))

    def forget(self, name: str) -> None:
        """Go on as if this weight were not stored."""
        del self.places[self.outer(name)]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.inner(name) for name in self.places)

    def outer(self, name: str) -> str:
        if self.prefix.startswith("-"):
            return self.prefix[1:] + name
        return name.removeprefix(self.prefix)

    def inner(self, name: str) -> str:
        if self.prefix.startswith("-"):
            return name.removeprefix(self.prefix[1:])
        return self.prefix + name if self.prefix else name

    def __contains__(self, name: str) -> bool:
        outer = self.outer(name)
        return outer in self.places and self.inner(outer) == name

    def read(self, name: str, rows: slice = EVERY) -> Tensor:
        """The weight, or some rows of it, where it lies: pages of the file, shared with the system's cache.

        They go with the tensor. What is written into it is written into a copy of them, never into the file.
        """
        outer = self.outer(name)
        file, start, size = self.places[outer]
        dtype, shape = self.slices[outer]
        if rows != EVERY:
            first, last, _ = rows.indices(shape[0])
            row = size // max(shape[0], 1)
            start, size, shape = start + first * row, (last - first) * row, (last - first, *shape[1:])
        if not size:
            return torch.empty(shape, dtype=dtype)
        before = start % mmap.ALLOCATIONGRANULARITY
        try:
            with file.open("rb") as opened:
                if os.fstat(opened.fileno()).st_size < start + size:
                    raise DeadweightError(f"{printable(file)} is truncated: {printable(outer)} is not complete")
                pages = mmap.mmap(opened.fileno(), before + size, access=mmap.ACCESS_COPY, offset=start - before)
        except OSError as error:
            raise DeadweightError(f"{printable(outer)} cannot be read ({reason(error)})") from error
        tensor = torch.frombuffer(pages, dtype=torch.uint8, count=size, offset=before)
        tensor = tensor if start % dtype.itemsize == 0 else tensor.clone()  # some files lay numbers at odd places
        return tensor.view(dtype).reshape(shape)

    def dtype(self, name: str) -> torch.dtype:
        return self.slices[self.outer(name)][0]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.slices[self.outer(name)][1]


def open_checkpoint(
    folder: Path, shapes: dict[str, tuple[int, ...]], optional: Iterable[str] = ()
) -> FileCheckpoint | None:
    """The folder's weights by the model's names; None if the names in the files are not the model's own.

    `shapes` are the parameters that the model needs; of tied ones only one name need be stored.
    """
    if not weight_files(folder):
        return None
    wanted, spare = set(shapes), set(optional)
    plain = FileCheckpoint(folder)
    stored = set(plain.places)
    for prefix in ("", *prefixes(wanted, stored)):
        result = FileCheckpoint(folder, prefix) if prefix else plain
        if wanted - spare <= set(result.names):
            check_shapes(result, shapes)
            return result
    return None


def forget_copies(file_checkpoint: FileCheckpoint, tied: Mapping[str, Iterable[str]]) -> None:
    """Of a tied weight that is stored under several names, keep one: two that differ later would no longer be tied."""
    for first, others in tied.items():
        kept, *copies = [name for name in (first, *others) if name in file_checkpoint] or [first]
        for name in copies:
            if file_checkpoint.shape(name) != file_checkpoint.shape(kept) or not torch.equal(
                file_checkpoint.read(name), file_checkpoint.read(kept)
            ):
                raise DeadweightError(
                    f"{printable(name)} and {printable(kept)} are tied by the config, and differ in the checkpoint; "
                    "expected one weight: set tie_word_embeddings to false in config.json if they are two"
                )
            file_checkpoint.forget(name)


def prefixes(wanted: set[str], stored: set[str]) -> list[str]:
    """A first name that all of the model's parameters may have and the stored ones not, or the other way round."""
    first = {name.split(".")[0] + "." for name in wanted}
    outer = {name.split(".")[0] + "." for name in stored}
    return sorted(first) + ["-" + p for p in sorted(outer)]


def check_shapes(checkpoint: Checkpoint, shapes: dict[str, tuple[int, ...]]) -> None:
    for name, shape in shapes.items():
        if name not in checkpoint:
            continue
        if checkpoint.shape(name) != tuple(shape):
            raise DeadweightError(
                f"{printable(name)} has shape {list(checkpoint.shape(name))} in the checkpoint; "
                f"expected {list(shape)}, which the config says"
            )
        if checkpoint.dtype(name) not in FLOATS:
            raise DeadweightError(
                f"{printable(name)} is stored as {checkpoint.dtype(name)}; expected floating-point numbers, "
                "which alone can be rewritten exactly"
            )
