"""Numbers that are made once and read once, much later: in a file without a name, mapped into memory.

The system keeps them in memory as long as there is room. The file is gone when nothing refers to it, also if the
process is killed.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from deadweight.compress.joined import Joined
from deadweight.compress.planes import Planes
from deadweight.compress.subspace import Subspace
from deadweight.compress.truncate import Spaces

SMALL = 1 << 20  # bytes that are not worth a file


def put_aside(tensor: Tensor, folder: Path | None) -> Tensor:
    """The same numbers, on disk; in memory as they are if that is not possible, if they are few, or on a GPU."""
    size = tensor.numel() * tensor.element_size()
    if size < SMALL or tensor.device.type != "cpu":
        return tensor
    try:
        handle, name = tempfile.mkstemp(dir=folder, prefix=".scratch-")
    except OSError:
        return tensor
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(tensor.detach().contiguous().view(torch.uint8).numpy().data)
        found = torch.from_file(name, shared=False, size=tensor.numel(), dtype=tensor.dtype)
    except (OSError, RuntimeError):  # no room
        return tensor
    finally:
        Path(name).unlink(missing_ok=True)
    return found.view(tensor.shape)


def spaces_aside(spaces: Spaces, folder: Path | None) -> Spaces:
    """What was found out about one attention, with its large matrices on disk."""

    def subspace(space: Subspace | None) -> Subspace | None:
        return None if space is None else replace(space, moment=put_aside(space.moment, folder))

    def numbers(planes: Planes | Joined | None) -> Planes | Joined | None:
        return replace(planes, damped=put_aside(planes.damped, folder)) if isinstance(planes, Joined) else planes

    return replace(
        spaces,
        values=tuple(map(subspace, spaces.values)),
        still=tuple(map(subspace, spaces.still)),
        planes=tuple(map(numbers, spaces.planes)),
    )
