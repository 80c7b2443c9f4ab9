"""The weights of a model, one at a time: from safetensors on disk, or from a module in memory."""

from __future__ import annotations

import json
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from deadweight.errors import DeadweightError
from deadweight.source.checkpoint_files import check_header, weight_files
from deadweight.source.printable import printable, reason
from deadweight.source.type_aliases import JsonObject

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
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
EVERY = slice(None)  # all rows
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Checkpoint(ABC):
    """Weights by the state-dict names of the model."""

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
        self.tensors: dict[str, Tensor] = {}
        seen: set[tuple[int, torch.Size]] = set()
        for name, tensor in module.state_dict(keep_vars=True).items():
            key = (id(tensor), tensor.shape)
            if key not in seen:
                seen.add(key)
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


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file: where its bytes are, and what they mean."""

    file: Path
    start: int  # the first byte
    n_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def rows(self, rows: slice) -> StoredTensor:
        """Some rows of it, which are contiguous in the file."""
        first, last, _ = rows.indices(self.shape[0])
        row = self.n_bytes // max(self.shape[0], 1)
        shape = (last - first, *self.shape[1:])
        return replace(self, start=self.start + first * row, n_bytes=(last - first) * row, shape=shape)


def stored_tensors(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file by name, from its header; safetensors itself checks offsets and sizes."""
    check_header(file)
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header: JsonObject = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    return {name: stored_tensor(file, 8 + length, name, entry) for name, entry in header.items()}


def stored_tensor(file: Path, data: int, name: str, entry: JsonObject) -> StoredTensor:
    """A tensor by its entry in the header of a file whose data begin at byte `data`."""
    kind, shape, (first, last) = entry.get("dtype"), entry.get("shape", ()), entry.get("data_offsets", (0, 0))
    if kind not in DTYPES:
        raise DeadweightError(
            f"{printable(name)} is stored as {kind}; expected one of {', '.join(DTYPES)}: quantised weights cannot be "
            "rewritten exactly"
        )
    return StoredTensor(file, data + first, last - first, DTYPES[kind], tuple(shape))


class FileCheckpoint(Checkpoint):
    """Safetensors files of one folder. The model's names have `prefix` before the stored ones; with −, lack it."""

    def __init__(self, folder: Path, prefix: str = "") -> None:
        self.folder, self.prefix = folder, prefix
        self.stored: dict[str, StoredTensor] = {}
        self.renamed: dict[str, str] = {}  # by the name in the file
        for file in weight_files(folder):
            self.stored |= stored_tensors(file)

    def forget(self, name: str) -> None:
        """Go on as if this weight were not stored."""
        del self.stored[self.outer(name)]

    def rename(self, name: str, new: str) -> None:
        """Give a stored weight another name of the model; its name in the file stays."""
        self.renamed[self.outer(name)] = new

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.inner(name) for name in self.stored)

    def outer(self, name: str) -> str:
        for outer, new in self.renamed.items():
            if new == name:
                return outer
        if self.prefix.startswith("-"):
            longer = self.prefix[1:] + name
            beside = (
                longer not in self.stored and name in self.stored
            )  # a head, say, that a model without it does not read
            return name if beside else longer
        return name.removeprefix(self.prefix)

    def inner(self, name: str) -> str:
        if name in self.renamed:
            return self.renamed[name]
        if self.prefix.startswith("-"):
            return name.removeprefix(self.prefix[1:])
        return self.prefix + name if self.prefix else name

    def __contains__(self, name: str) -> bool:
        outer = self.outer(name)
        return outer in self.stored and self.inner(outer) == name

    def read(self, name: str, rows: slice = EVERY) -> Tensor:
        """The weight, or some rows of it, memory-mapped copy-on-write: writing into it never changes the file."""
        outer = self.outer(name)
        stored = self.stored[outer] if rows == EVERY else self.stored[outer].rows(rows)
        if not stored.n_bytes:
            return torch.empty(stored.shape, dtype=stored.dtype)
        before = stored.start % mmap.ALLOCATIONGRANULARITY
        try:
            with stored.file.open("rb") as opened:
                if os.fstat(opened.fileno()).st_size < stored.start + stored.n_bytes:
                    raise DeadweightError(f"{printable(stored.file)} is truncated: {printable(outer)} is not complete")
                size, offset = before + stored.n_bytes, stored.start - before
                pages = mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_COPY, offset=offset)
        except OSError as error:
            raise DeadweightError(f"{printable(outer)} cannot be read ({reason(error)})") from error
        tensor = torch.frombuffer(pages, dtype=torch.uint8, count=stored.n_bytes, offset=before)
        aligned = stored.start % stored.dtype.itemsize == 0  # some files are not
        return (tensor if aligned else tensor.clone()).view(stored.dtype).reshape(stored.shape)

    def dtype(self, name: str) -> torch.dtype:
        return self.stored[self.outer(name)].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return self.stored[self.outer(name)].shape


def open_checkpoint(
    folder: Path, shapes: dict[str, tuple[int, ...]], optional: Iterable[str] = ()
) -> FileCheckpoint | None:
    """The folder's weights by the model's names; None if the names in the files are not the model's own.

    `shapes` are the parameters that the model needs; those that are `optional` (tied ones, say) may be missing.
    """
    if not weight_files(folder):
        return None
    wanted, spare = set(shapes), set(optional)
    plain = FileCheckpoint(folder)
    for prefix in ("", *prefixes(wanted, set(plain.stored))):
        result = FileCheckpoint(folder, prefix) if prefix else plain
        if wanted - spare <= set(result.names):
            check_shapes(result, shapes)
            return result
    return None


def forget_copies(file_checkpoint: FileCheckpoint, tied: Mapping[str, Iterable[str]]) -> None:
    """Keep one copy of each tied weight, under its first name: rewritten apart, several copies would differ.

    Rewrites use the first name, and a weight is stored with the module of its name. The file may have another name.
    """
    for first, others in tied.items():
        kept, *copies = [name for name in (first, *others) if name in file_checkpoint] or [first]
        for name in copies:
            if file_checkpoint.shape(name) != file_checkpoint.shape(kept) or not torch.equal(
                file_checkpoint.read(name), file_checkpoint.read(kept)
            ):
                raise DeadweightError(
                    f"{printable(name)} and {printable(kept)} are tied by the config, but differ in the checkpoint; "
                    "expected equal weights: set tie_word_embeddings to false in config.json if they are not tied"
                )
            file_checkpoint.forget(name)
        if kept != first:
            file_checkpoint.rename(kept, first)


def prefixes(wanted: set[str], stored: set[str]) -> list[str]:
    """First components of names: the model's may have one that the stored names lack, or (−) the other way round."""
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
                f"expected {list(shape)}, as the config says"
            )
        if checkpoint.dtype(name) not in FLOATS:
            raise DeadweightError(
                f"{printable(name)} is stored as {checkpoint.dtype(name)}; expected floating-point numbers of 16 bits "
                "or more: others cannot be rewritten exactly"
            )
