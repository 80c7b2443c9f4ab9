"""Repeated blocks: a deep model is analysed on as few of its blocks as show every kind of them.

A list of blocks is cut to its shortest prefix in which every block finds one like itself: of the same kind, with the
same neighbours and the same kinds after it. What is proved of the one holds for the other, because a proof speaks of
operations and not of weights. That needs blocks of one kind to be the same operations, used in the same way: equal
settings, equal arguments, equal steps of the model between them, and no reader of a stream in the middle of the list.
One run of the whole model on shapes alone shows the last three.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from deadweight.source.kinds import Arguments, Keywords, Leaf
from deadweight.source.private import OpOverload

LEAST = 3  # blocks: a first, a middle and a last
List = nn.ModuleList | nn.Sequential
POSITION_ATTRIBUTES = {"layer_idx", "layer_id", "layer_index", "layer_number", "idx", "layer_num", "block_idx"}

NOT_SETTINGS = POSITION_ATTRIBUTES | set(vars(nn.Module()))


@dataclass(frozen=True)
class Blocks:
    """One list of blocks: where it is, how many are kept, and which kept block stands for each."""

    path: str
    kept: int
    representatives: tuple[int, ...]

    def represented(self, kept: int) -> list[int]:
        """Every block that a kept one stands for."""
        return [i for i, representative in enumerate(self.representatives) if representative == kept]

    def index_in(self, name: str) -> int | None:
        """Which block of this list a parameter belongs to."""
        match = re.match(re.escape(self.path) + r"\.(\d+)\.", name)
        return int(match[1]) if match else None

    def shifted(self, text: str, offset: int) -> str:
        """The same words about blocks that stand so many places on."""
        named = rf"(?<![\w.]){re.escape(self.path)}\.(\d+)\."
        return re.sub(named, lambda found: f"{self.path}.{int(found[1]) + offset}.", text)

    def moved(self, name: str, index: int) -> str:
        """The same parameter in another block."""
        return re.sub(re.escape(self.path) + r"\.\d+\.", f"{self.path}.{index}.", name, count=1)


def collapse(module: nn.Module, record: Record) -> tuple[Blocks, ...]:
    """Cut every long list of repeated blocks, in place, and say what was cut, after a recorded run of it or a copy."""
    cut = []
    for path, blocks in record.lists.items():
        uses = record.uses_of(path, len(blocks))
        if uses is None:
            continue
        kinds = number(tuple(record.signatures[id(b)] + use for b, use in zip(blocks, uses, strict=True)))
        kept, representatives = shortest_prefix(kinds)
        if kept < len(blocks):
            cut.append(Blocks(path, kept, representatives))
            short = list(cast(List, module.get_submodule(path)))[:kept]
            whole = nn.Sequential(*short) if isinstance(blocks, nn.Sequential) else nn.ModuleList(short)
            replace_list(module, path, whole)
    return tuple(cut)


def outermost_lists(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, List]]:
    """Lists of blocks that are not inside another such list."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and is_long_list(child):
            yield path, child
        elif not isinstance(child, nn.ModuleList):
            yield from outermost_lists(child, f"{path}.")


def is_long_list(result: List) -> bool:
    """More blocks than are kept, in a plain list: a class of its own may do more than run through them."""
    return type(result) in (nn.ModuleList, nn.Sequential) and len(result) > LEAST and all(map(is_block, result))


def is_block(module: nn.Module | None) -> bool:
    """More than one layer inside: not a bare linear map or norm, whose lists are often indexed from outside.

    Lists may hold None where a layer is switched off.
    """
    return module is not None and sum(1 for m in module.modules() if any(True for _ in m.parameters(recurse=False))) > 1


class Record(TorchDispatchMode):
    """What a model does with its blocks: calls, their arguments, and the operations between them.

    While `skimming`, a block that is called as an equal one was before hands out copies of that one's result: the
    model around the blocks runs as it is, at a cost that does not grow with depth.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.lists = dict(outermost_lists(module))
        self.places = {id(b): (path, i) for path, blocks in self.lists.items() for i, b in enumerate(blocks)}
        self.signatures = {id(b): signature(b) for blocks in self.lists.values() for b in blocks}
        self.results: dict[str, Leaf] = {}
        self.reset()

    def reset(self) -> None:
        self.calls: dict[str, list[tuple[int, str]]] = {}  # per list: places and argument descriptions
        self.between: dict[str, list[list[str]]] = {}  # per list: the operations after each call
        self.made: dict[int, tuple[str, int]] = {}  # id of a block's output to where it came from
        self.alive: list[Tensor] = []  # keeps ids unique
        self.last: dict[str, int] = {}
        self.tapped: set[str] = set()
        self.depth = 0

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> Leaf:
        if self.depth == 0:
            for leaf in pytree.tree_leaves((args, kwargs)):
                self.read(leaf)
            for gaps in self.between.values():
                gaps[-1].append(str(func))
        return func(*args, **(kwargs or {}))

    def read(self, leaf: Leaf) -> None:
        """Remember which list has a block in its middle whose output is read outside the blocks."""
        path, place = self.made.get(id(leaf), ("", -1)) if isinstance(leaf, Tensor) else ("", -1)
        if path and place < self.last[path]:
            self.tapped.add(path)

    def watch(self, run: Callable[[Record], object]) -> None:
        """One run of the model; its outputs count as read."""
        self.reset()
        for leaf in pytree.tree_leaves(run(self)):
            self.read(leaf)

    @contextmanager
    def skimming(self) -> Iterator[Record]:
        blocks = [b for found in self.lists.values() for b in found]
        own = [vars(block).get("forward") for block in blocks]
        for block in blocks:
            block.forward = partial(self.call, block, block.forward)
        try:
            yield self
        finally:
            for block, forward in zip(blocks, own, strict=True):
                del block.forward
                if forward is not None:
                    block.forward = forward

    def call(self, block: nn.Module, forward: Callable[..., Leaf], *args: Leaf, **kwargs: Leaf) -> Leaf:
        path, place = self.places[id(block)]
        outermost = self.depth == 0
        leaves = pytree.tree_leaves((args, kwargs))
        described = [self.described(leaf, path, place, first=i == 0) for i, leaf in enumerate(leaves)]
        key = self.signatures[id(block)] + repr(described) + repr(sorted(kwargs))
        self.depth += 1
        try:
            output = forward(*args, **kwargs) if key not in self.results else copied(self.results[key])
            self.results[key] = output
        finally:
            self.depth -= 1
        if outermost:
            self.calls.setdefault(path, []).append((place, repr(described) + repr(sorted(kwargs))))
            self.note(path, place, output)
        return output

    def described(self, leaf: Leaf, path: str, place: int, *, first: bool) -> str:
        """A value by its kind, or by how many blocks back it was made; the first block's own input counts as one."""
        if not isinstance(leaf, Tensor):
            return repr(leaf) if isinstance(leaf, (int, float, str, bool, type(None))) else type(leaf).__qualname__
        origin = self.made.get(id(leaf))
        if origin is not None and origin[0] == path:
            return f"block{origin[1] - place}{tuple(leaf.shape)}"
        if first and place == 0:
            return f"block-1{tuple(leaf.shape)}"
        return f"{leaf.dtype}{tuple(leaf.shape)}"

    def note(self, path: str, place: int, output: Leaf) -> None:
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, Tensor):
                self.made[id(leaf)] = (path, place)
                self.alive.append(leaf)
        self.last[path] = place
        self.between.setdefault(path, []).append([])

    def uses_of(self, path: str, count: int) -> list[str] | None:
        """A description of how each block is used; None if the list is not simply run through once, in order."""
        calls = self.calls.get(path, [])
        if [place for place, _ in calls] != list(range(count)) or path in self.tapped:
            return None
        gaps = self.between[path]
        return [f"{inputs}{gaps[i - 1] if i else []}" for i, (_, inputs) in enumerate(calls)]


def copied(output: Leaf) -> Leaf:
    return pytree.tree_map_only(Tensor, lambda t: t.clone(), output)


def signature(block: nn.Module) -> str:
    """Everything that makes two blocks behave alike: classes, shapes, settings; not their weights or their place."""
    parts = []
    for name, module in block.named_modules():
        own = sorted(f"{k}={setting(v)}" for k, v in vars(module).items() if k not in NOT_SETTINGS)
        tensors = [f"{k}{tuple(v.shape)}" for k, v in module.named_parameters(recurse=False)]
        tensors += [f"{k}{constant(v)}" for k, v in module.named_buffers(recurse=False)]
        parts.append(f"{name}:{type(module).__qualname__}({','.join(own)})[{','.join(tensors)}]")
    return "\n".join(parts)


def setting(value: object) -> str:
    """Plain values by what they say; everything else by what it is: one object shared by all blocks, or not."""
    if isinstance(value, (int, float, str, bool, type(None), tuple, list, dict, set, frozenset, torch.dtype)):
        return repr(value)
    return f"{type(value).__qualname__}@{id(value)}"


def constant(buffer: Tensor) -> str:
    """A small buffer by its values where it has any."""
    known = not buffer.is_meta and buffer.numel() <= 4096
    return f"{tuple(buffer.shape)}{buffer.flatten().tolist() if known else ''}"


def number(signatures: tuple[str, ...]) -> tuple[int, ...]:
    order = {s: i for i, s in enumerate(dict.fromkeys(signatures))}
    return tuple(order[s] for s in signatures)


def shortest_prefix(kinds: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """How many blocks to keep, and which of them stands for each block of the whole list.

    A kept block may stand for another if both have the same kind, the same neighbours, and the same kinds of blocks
    after them: then whatever follows a change in one follows it in the other. The last block stands for the last.
    """
    whole = [surroundings(kinds, i) for i in range(len(kinds))]
    for kept in range(LEAST, len(kinds)):
        place = {surroundings(kinds[:kept], i): i for i in reversed(range(kept))}
        if kinds[kept - 2 : kept] == kinds[-2:] and all(key in place for key in whole):
            return kept, tuple(place[key] for key in whole)
    return len(kinds), tuple(range(len(kinds)))


def surroundings(kinds: tuple[int, ...], i: int) -> tuple[object, ...]:
    before = kinds[i - 1] if i else None
    after = kinds[i + 1] if i + 1 < len(kinds) else None
    return before, kinds[i], after, frozenset(kinds[i + 1 :])


def replace_list(module: nn.Module, path: str, blocks: List) -> None:
    parent, _, name = path.rpartition(".")
    setattr(module.get_submodule(parent) if parent else module, name, blocks)
