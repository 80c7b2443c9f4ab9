"""Repeated blocks: a deep model is analysed on as few of its blocks as show every kind.

A list of blocks is cut to its shortest prefix that represents every block: by one of the same kind, with the same
neighbours and the same kinds after it. What is proved about the one holds for the other, because proofs are about
operations, not weights. For that, blocks of one kind must be the same operations, used in the same way: equal settings,
equal arguments, equal operations of the model between them, and no reader of an output in the middle of the list. One
run of the whole model on fake tensors shows the last three.
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

from deadweight.source.private_api import OpOverload
from deadweight.source.type_aliases import Arguments, Keywords, Leaf

LEAST = 3  # blocks: a first, a middle and a last
List = nn.ModuleList | nn.Sequential
POSITION_ATTRIBUTES = {"layer_idx", "layer_id", "layer_index", "layer_number", "idx", "layer_num", "block_idx"}

NOT_SETTINGS = POSITION_ATTRIBUTES | set(vars(nn.Module()))


@dataclass(frozen=True)
class Blocks:
    """One list of blocks: its path, how many are kept, and which kept block represents each."""

    path: str
    kept: int
    representatives: tuple[int, ...]

    def represented(self, kept: int) -> list[int]:
        """The numbers of the blocks that a kept one represents."""
        return [i for i, representative in enumerate(self.representatives) if representative == kept]

    def index_in(self, name: str) -> int | None:
        """The number of the block to which a parameter belongs; None if it is outside the list."""
        match = re.match(re.escape(self.path) + r"\.(\d+)\.", name)
        return int(match[1]) if match else None

    def shifted(self, text: str, offset: int) -> str:
        """The same text with the numbers of blocks increased by `offset`."""
        named = rf"(?<![\w.]){re.escape(self.path)}\.(\d+)\."
        return re.sub(named, lambda match: f"{self.path}.{int(match[1]) + offset}.", text)

    def moved(self, name: str, index: int) -> str:
        """The same parameter in another block."""
        return re.sub(re.escape(self.path) + r"\.\d+\.", f"{self.path}.{index}.", name, count=1)


def collapse(module: nn.Module, record: Record) -> tuple[Blocks, ...]:
    """Cut every long list of repeated blocks in place, given the record of a run of the module or of a copy."""
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
    """A plain list with more blocks than are kept at least; a subclass may do more than run its blocks in order."""
    return type(result) in (nn.ModuleList, nn.Sequential) and len(result) > LEAST and all(map(is_block, result))


def is_block(module: nn.Module | None) -> bool:
    """A module with more than one layer inside: lists of bare linear maps or norms are often indexed one by one.

    A list may hold None for a layer that is switched off.
    """
    return module is not None and sum(1 for m in module.modules() if any(True for _ in m.parameters(recurse=False))) > 1


class Record(TorchDispatchMode):
    """A record of how a model uses its blocks: calls, their arguments, and the operations between them.

    While `skimming`, a block that is called like an equal one before returns a copy of that one's result. The rest of
    the model runs as it is, so the cost does not grow with depth.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.lists = dict(outermost_lists(module))
        self.places = {id(b): (path, i) for path, blocks in self.lists.items() for i, b in enumerate(blocks)}
        self.signatures = {id(b): signature(b) for blocks in self.lists.values() for b in blocks}
        self.results: dict[str, Leaf] = {}
        self.reset()

    def reset(self) -> None:
        self.calls: dict[str, list[tuple[int, str]]] = {}  # per list: numbers of blocks and descriptions of arguments
        self.between: dict[str, list[list[str]]] = {}  # per list: the operations after each call
        self.made: dict[int, tuple[str, int]] = {}  # id of a block's output to the list and number of the block
        self.alive: list[Tensor] = []  # keeps tensors alive, so that ids stay unique
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
        """Note a list if the output of a block in its middle is read outside the blocks."""
        path, place = self.made.get(id(leaf), ("", -1)) if isinstance(leaf, Tensor) else ("", -1)
        if path and place < self.last[path]:
            self.tapped.add(path)

    def watch(self, run: Callable[[Record], object]) -> None:
        """Record one run of the model; its outputs count as read."""
        self.reset()
        for leaf in pytree.tree_leaves(run(self)):
            self.read(leaf)

    @contextmanager
    def skimming(self) -> Iterator[Record]:
        blocks = [block for members in self.lists.values() for block in members]
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
            output = forward(*args, **kwargs) if key not in self.results else clone_tensors(self.results[key])
            self.results[key] = output
        finally:
            self.depth -= 1
        if outermost:
            self.calls.setdefault(path, []).append((place, repr(described) + repr(sorted(kwargs))))
            self.note(path, place, output)
        return output

    def described(self, leaf: Leaf, path: str, place: int, *, first: bool) -> str:
        """A value by its type and shape, or by how many blocks back it was computed; the list's input counts as one."""
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
        """A description of how each block is used; None unless all blocks are called once, in order."""
        calls = self.calls.get(path, [])
        if [place for place, _ in calls] != list(range(count)) or path in self.tapped:
            return None
        gaps = self.between[path]
        return [f"{inputs}{gaps[i - 1] if i else []}" for i, (_, inputs) in enumerate(calls)]


def clone_tensors(output: Leaf) -> Leaf:
    return pytree.tree_map_only(Tensor, lambda t: t.clone(), output)


def signature(block: nn.Module) -> str:
    """What two blocks must share to be of one kind: classes, shapes and settings, not weights or positions."""
    parts = []
    for name, module in block.named_modules():
        own = sorted(f"{k}={setting(v)}" for k, v in vars(module).items() if k not in NOT_SETTINGS)
        tensors = [f"{k}{tuple(v.shape)}" for k, v in module.named_parameters(recurse=False)]
        tensors += [f"{k}{constant(v)}" for k, v in module.named_buffers(recurse=False)]
        parts.append(f"{name}:{type(module).__qualname__}({','.join(own)})[{','.join(tensors)}]")
    return "\n".join(parts)


def setting(value: object) -> str:
    """Plain values by their repr, a partial by its function and arguments; any other object by its identity."""
    if type(value) is partial and not vars(value):
        arguments = [*map(setting, value.args), *(f"{k}={setting(v)}" for k, v in sorted(value.keywords.items()))]
        return f"partial({setting(value.func)},{arguments})"
    if isinstance(value, (int, float, str, bool, type(None), tuple, list, dict, set, frozenset, torch.dtype)):
        return repr(value)
    return f"{type(value).__qualname__}@{id(value)}"


def constant(buffer: Tensor) -> str:
    """A buffer by its shape and, if it is small and has values, by these."""
    known = not buffer.is_meta and buffer.numel() <= 4096
    return f"{tuple(buffer.shape)}{buffer.flatten().tolist() if known else ''}"


def number(signatures: tuple[str, ...]) -> tuple[int, ...]:
    order = {s: i for i, s in enumerate(dict.fromkeys(signatures))}
    return tuple(order[s] for s in signatures)


def shortest_prefix(kinds: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """How many blocks to keep, and which of them represents each block of the whole list.

    A kept block may represent another if both have the same kind, the same neighbours, and the same kinds of blocks
    after them: then a change in one has the same consequences as in the other. The last block represents the last.
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
