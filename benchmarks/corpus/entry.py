"""One module of the corpus: how it is built, what it is called with, and what it needs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Made = tuple[nn.Module, Any]  # the module, and its inputs as deadweight.audit takes them


@dataclass(frozen=True)
class Entry:
    """A module that is built when its turn comes, in a process of its own."""

    name: str  # group/module
    make: Callable[[], Made]
    package: str = ""  # must be importable
    checkout: str = ""  # a folder of --checkouts, which is put on the path
    complete: bool = False  # small enough for the account of completeness
    training: bool = False  # audited in training mode

    @property
    def group(self) -> str:
        return self.name.partition("/")[0]


def imported(place: str) -> Any:
    """What stands at package.module:name."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def called(place: str, *inputs: Tensor, **options: Any) -> Callable[[], Made]:
    """A recipe: the class or function at `place`, called with options, and its inputs."""
    return lambda: (imported(place)(**options), inputs)


def image(size: int = 224, channels: int = 3) -> Tensor:
    """One image of random pixels."""
    return torch.randn(1, channels, size, size, generator=torch.Generator().manual_seed(0))


def tokens(vocabulary: int, length: int = 16, batch: int = 1) -> Tensor:
    """Random tokens; the highest one occurs, so that the whole vocabulary may be drawn."""
    drawn = torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))
    drawn[..., -1] = vocabulary - 1
    drawn[..., 0] = 0
    return drawn


def floats(*shape: int) -> Tensor:
    """Random features."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))
