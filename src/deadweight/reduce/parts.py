"""The tensors of a reduced checkpoint, as they will be stored: made part by part, on all threads, in a fixed order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from deadweight.reduce.apply import Applied, Group, Scaled, Weights, apply, checked, independent, rounding
from deadweight.reduce.job import Job
from deadweight.reduce.pipeline import in_order
from deadweight.reduce.rewrite import Rewrite
from deadweight.reduce.windows import Windows
from deadweight.save.facts import module_of
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


def stream(
    job: Job,
    rewrites: Group,
    applied: Applied,
    layers: dict[str, Layer],
    say: Callable[[str], None],
    made: Made | None = None,
    windows: Windows | None = None,
) -> Generator[tuple[str, Tensor]]:
    """Every tensor of the new checkpoint, by its name in the model; `applied` and `layers` fill up on the way."""
    wanted = windows.wanted if windows is not None else set()
    with closing(in_order(parts(job, rewrites, made, wanted), workers(), held_bytes, ROOM)) as items:
        for item in items:
            if isinstance(item, Stored):
                yield item.name, item.tensor
            elif isinstance(item, Final):
                assert windows is not None
                windows.feed(item.name, item.value)
            else:
                applied.outcomes.update(item.applied.outcomes)
                layers.update(item.layers)
                say(f"writing: {len(applied.outcomes)} of {len(rewrites)} rewrites")


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
    own, layers = Applied() if made is None else made.applied.at(group), dict[str, Layer]()
    weights = Weights(job.read, scaled=rounding(job.precision))
    finals = apply(group, weights, own) if made is None else made.finals(group)
    due, ready = Due(group.values()), dict[str, Tensor]()
    for name, value in finals:
        if value is not None:
            ready[name] = value.rounded if isinstance(value, Scaled) else value.to(job.precision(name))
        if name in wanted:
            yield Final(name, value)
        del value  # in float64 it is four times as large
        for unit in due.released(name):
            yield from finished(job, unit, names, ready, own, layers)
    yield Done(own, layers)


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


def finished(
    job: Job, modules: set[str], names: Names, ready: dict[str, Tensor], applied: Applied, layers: dict[str, Layer]
) -> Iterator[Item]:
    """The tensors of complete modules, in their own precision."""

    def whole(name: str) -> Tensor:
        return ready[name] if name in ready else checked(name, job.read(name))

    replaced: set[str] = set()
    if job.layout == "slim":
        facts = [f for f in applied.facts if path_of(f) in modules]
        form = slim_layout(job.whole, facts)
        layers.update(form.layers)
        for path in form.layers:
            for name, tensor in form.tensors(path, whole).items():
                yield Stored(name, tensor)
        replaced = set(form.replaces)
    for name in names.of(modules):
        if name not in replaced:
            yield Stored(name, whole(name))
    for name in [n for n in ready if module_of(n) in modules]:
        del ready[name]


def path_of(fact: Any) -> str:
    return str(getattr(fact, "module", "") or module_of(fact.parameter))
