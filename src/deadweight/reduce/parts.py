"""The tensors of a reduced checkpoint, as they will be stored: made part by part, on all threads, in a fixed order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from deadweight.reduce.apply import Applied, Group, Scaled, Weights, apply, checked, independent, rounding
from deadweight.reduce.job import Job
from deadweight.reduce.pipeline import in_order
from deadweight.reduce.windows import Windows
from deadweight.rewrite.rewrite import Rewrite
from deadweight.save.facts import Fact, Passed, module_of
from deadweight.save.layout import Layer
from deadweight.save.layout import layout as slim_layout
from deadweight.threads import workers

ROOM = 64 << 20  # bytes of finished tensors that may wait for the file


@dataclass(frozen=True)
class Made:
    """A plan that was carried out already, all of it in memory."""

    weights: dict[str, Tensor]  # what changed, in float64
    applied: Applied

    def finals(self, group: Group) -> Iterator[tuple[str, Tensor | None]]:
        """What `apply` gave out."""
        for name in dict.fromkeys(n for rewrite in group.values() for n in rewrite.touches):
            yield name, self.weights.get(name)


@dataclass(frozen=True)
class Final:
    """A weight that no later rewrite changes, as it is computed."""

    name: str
    value: Any  # a tensor in float64, Scaled, or None if nothing changed it


@dataclass(frozen=True)
class Stored:
    """A tensor as it will be stored, by its name in the model."""

    name: str
    tensor: Tensor


@dataclass(frozen=True)
class Done:
    """The end of a part: what came of its rewrites, and its layers as they are stored."""

    applied: Applied
    layers: dict[str, Layer]


Item = Final | Stored | Done


class Stream:
    """Every tensor of the new checkpoint, by its name in the model.

    A plan that was carried out already (`made`) is not applied again. `windows` see every weight pass that they check.
    What came of the rewrites (`applied`), and the layers as they are stored, fill up on the way.
    """

    def __init__(self, job: Job, rewrites: Group, made: Made | None = None, windows: Windows | None = None) -> None:
        self.job, self.rewrites, self.made, self.windows = job, rewrites, made, windows
        self.applied, self.layers = Applied(), dict[str, Layer]()

    def tensors(self, say: Callable[[str], None]) -> Generator[tuple[str, Tensor]]:
        wanted = self.windows.wanted if self.windows is not None else set()
        jobs = parts(self.job, self.rewrites, self.made, wanted)
        with closing(in_order(jobs, workers(), held_bytes, ROOM)) as items:
            for item in items:
                if isinstance(item, Stored):
                    yield item.name, item.tensor
                elif isinstance(item, Final):
                    assert self.windows is not None
                    self.windows.feed(item.name, item.value)
                else:
                    self.applied.outcomes.update(item.applied.outcomes)
                    self.layers.update(item.layers)
                    say(f"writing: {len(self.applied.outcomes)} of {len(self.rewrites)} rewrites")


def parts(job: Job, rewrites: Group, made: Made | None, wanted: set[str]) -> list[Callable[[], Iterator[Item]]]:
    """One for every group of rewrites that has modules of its own, then one for every weight that none touches."""
    groups, names = independent(rewrites), Names(job)
    touched = {module_of(n) for group in groups for rewrite in group.values() for n in rewrite.touches}
    rest = [n for n in job.checkpoint.names if module_of(n) not in touched]
    changed: list[Callable[[], Iterator[Item]]] = [partial(of_group, job, g, names, made, wanted) for g in groups]
    return [*changed, *(partial(untouched, job, name) for name in rest)]


def held_bytes(item: Item) -> int:
    value = item.tensor if isinstance(item, Stored) else item.value if isinstance(item, Final) else None
    return value.numel() * value.dtype.itemsize if isinstance(value, Tensor) else 0


class Names:
    """Stored names by the module that holds them."""

    def __init__(self, job: Job) -> None:
        self.by_module: dict[str, list[tuple[int, str]]] = defaultdict(list)
        for place, name in enumerate(job.checkpoint.names):
            self.by_module[module_of(name)].append((place, name))

    def of(self, modules: Iterable[str]) -> list[str]:
        """In the order of the checkpoint."""
        return [name for _, name in sorted(pair for m in modules for pair in self.by_module.get(m, ()))]


def untouched(job: Job, name: str) -> Iterator[Item]:
    """As it is: read once, looked through once, written."""
    yield Stored(name, checked(name, job.checkpoint.read(name)))


def of_group(job: Job, group: Group, names: Names, made: Made | None, wanted: set[str]) -> Iterator[Item]:
    """The modules that these rewrites touch, each as soon as all its weights are final."""
    part = Part(job, names, Applied() if made is None else made.applied.at(group))
    weights = Weights(job.read, scaled=rounding(job.precision))
    finals = apply(group, weights, part.applied) if made is None else made.finals(group)
    due = Due(group.values())
    for name, value in finals:
        if value is not None:
            part.ready[name] = value.rounded if isinstance(value, Scaled) else value.to(job.precision(name))
        if name in wanted:
            yield Final(name, value)
        del value  # in float64 it is four times as large
        for unit in due.released(name):
            yield from part.finish(unit)
    yield Done(part.applied, part.layers)


@dataclass
class Part:
    """A group of modules on its way: the weights that are final, and the layers that are complete."""

    job: Job
    names: Names
    applied: Applied
    ready: dict[str, Tensor] = field(default_factory=dict)
    layers: dict[str, Layer] = field(default_factory=dict)

    def finish(self, modules: set[str]) -> Iterator[Item]:
        """The tensors of complete modules, in their own precision."""
        replaced: set[str] = set()
        if self.job.layout == "slim":
            facts = [f for f in self.applied.facts if path_of(f) in modules]
            form = slim_layout(self.job.whole, facts)
            self.layers.update(form.layers)
            for path in form.layers:
                for name, tensor in form.tensors(path, self.whole).items():
                    yield Stored(name, tensor)
            replaced = set(form.replaces)
        for name in self.names.of(modules):
            if name not in replaced:
                yield Stored(name, self.whole(name))
        for name in [n for n in self.ready if module_of(n) in modules]:
            del self.ready[name]

    def whole(self, name: str) -> Tensor:
        return self.ready[name] if name in self.ready else checked(name, self.job.read(name))


class Due:
    """Which modules are complete: all their weights that any rewrite touches are final."""

    def __init__(self, rewrites: Iterable[Rewrite]) -> None:
        self.unit_of: dict[str, int] = {}
        groups: list[set[str]] = []
        waiting: list[set[str]] = []
        for rewrite in rewrites:
            for name in rewrite.touches:
                path = module_of(name)
                if path not in self.unit_of:
                    self.unit_of[path] = len(groups)
                    groups.append({path})
                    waiting.append(set())
                waiting[self.unit_of[path]].add(name)
            if rewrite.stored_together:
                first, *others = dict.fromkeys(self.unit_of[module_of(n)] for n in rewrite.touches)
                for other in others:
                    for path in groups[other]:
                        self.unit_of[path] = first
                    groups[first] |= groups[other]
                    waiting[first] |= waiting[other]
                    groups[other], waiting[other] = set(), set()
        self.groups, self.waiting = groups, waiting

    def released(self, name: str) -> Iterator[set[str]]:
        number = self.unit_of[module_of(name)]
        self.waiting[number].discard(name)
        if not self.waiting[number]:
            yield self.groups[number]


def path_of(fact: Fact) -> str:
    return fact.module if isinstance(fact, Passed) else module_of(fact.parameter)
