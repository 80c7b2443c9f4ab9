"""Repeated blocks: a deep model is analysed on as few of its blocks as show every kind of them.

A list of blocks is cut to its shortest prefix that holds each kind up to three times: a first, a middle and a last
one. What is proved of a kept block holds for every block of its kind in the same position, because a proof speaks of
operations and not of weights, and blocks of one kind are the same operations.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

OCCURRENCES = 3
POSITION_ATTRIBUTES = {"layer_idx", "layer_id", "layer_index", "layer_number", "idx", "layer_num", "block_idx"}


@dataclass(frozen=True)
class Blocks:
    """One list of blocks: where it is, the kind of each block, and how many are kept."""

    path: str
    kinds: tuple[int, ...]
    kept: int

    def representative(self, index: int) -> int:
        """The kept block that stands for this one: the first, a middle or the last of its kind."""
        places = [i for i, kind in enumerate(self.kinds) if kind == self.kinds[index]]
        kept = [i for i in places if i < self.kept]
        if index == places[0]:
            return kept[0]
        return kept[-1] if index == places[-1] else kept[min(1, len(kept) - 1)]

    def index_in(self, name: str) -> int | None:
        """Which block of this list a parameter belongs to."""
        found = re.match(re.escape(self.path) + r"\.(\d+)\.", name)
        return int(found[1]) if found else None

    def moved(self, name: str, index: int) -> str:
        """The same parameter in another block."""
        return re.sub(re.escape(self.path) + r"\.\d+\.", f"{self.path}.{index}.", name, count=1)


def collapse(module: nn.Module) -> tuple[Blocks, ...]:
    """Cut every long list of repeated blocks, in place, and say what was cut."""
    cut = []
    for path, blocks in outermost_lists(module):
        kinds = number(tuple(signature(block) for block in blocks))
        kept = shortest_prefix(kinds)
        if kept < len(blocks):
            cut.append(Blocks(path, kinds, kept))
            replace_list(module, path, nn.ModuleList(list(blocks)[:kept]))
    return tuple(cut)


def outermost_lists(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.ModuleList]]:
    """Lists of blocks that are not inside another such list."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if type(child) is nn.ModuleList and len(child) > OCCURRENCES and all(is_block(b) for b in child):
            yield path, child
        elif not isinstance(child, nn.ModuleList):
            yield from outermost_lists(child, f"{path}.")


def is_block(module: nn.Module) -> bool:
    """More than one layer inside: not a bare linear map or norm, whose lists are often indexed from outside."""
    return sum(1 for m in module.modules() if any(True for _ in m.parameters(recurse=False))) > 1


def signature(block: nn.Module) -> str:
    """Everything that makes two blocks behave alike: classes, shapes, settings; not their weights or their place."""
    parts = []
    for name, module in block.named_modules():
        settings = sorted(
            f"{key}={value!r}"
            for key, value in vars(module).items()
            if key not in POSITION_ATTRIBUTES and isinstance(value, (int, float, str, bool, type(None)))
        )
        tensors = [f"{k}{tuple(v.shape)}" for k, v in module.named_parameters(recurse=False)]
        tensors += [f"{k}{tuple(v.shape)}" for k, v in module.named_buffers(recurse=False)]
        parts.append(f"{name}:{type(module).__qualname__}({','.join(settings)})[{','.join(tensors)}]")
    return "\n".join(parts)


def number(signatures: tuple[str, ...]) -> tuple[int, ...]:
    order = list(dict.fromkeys(signatures))
    return tuple(order.index(s) for s in signatures)


def shortest_prefix(kinds: tuple[int, ...]) -> int:
    """Up to three blocks of every kind."""
    needed = 0
    for kind in set(kinds):
        places = [i for i, k in enumerate(kinds) if k == kind]
        needed = max(needed, places[min(OCCURRENCES, len(places)) - 1] + 1)
    return needed


def replace_list(module: nn.Module, path: str, blocks: nn.ModuleList) -> None:
    parent, _, name = path.rpartition(".")
    setattr(module.get_submodule(parent) if parent else module, name, blocks)
