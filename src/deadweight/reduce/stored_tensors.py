"""The tensors of a reduced checkpoint as they are stored: computed part by part, on all threads, in a fixed order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from deadweight.progress import Progress
from deadweight.reduce.apply import (
    Applied,
    FinalWeight,
    Rewrites,
    ScaledWeight,
    Weights,
    apply,
    independent,
    require_finite,
    scale_and_round,
)
from deadweight.reduce.job import ReductionJob
from deadweight.reduce.layer_windows import Windows
from deadweight.reduce.ordered_threads import in_order
from deadweight.rewrite.rewrite import Rewrite
from deadweight.save.facts import Fact, Passed, module_of
from deadweight.save.slim_layout import SlimLayer
from deadweight.save.slim_layout import layout as slim_layout
from deadweight.threads import workers

ROOM = 64 << 20  # bytes of finished tensors that may wait to be written


@dataclass(frozen=True)
class Made:
    """A plan that was applied in memory."""

    weights: dict[str, Tensor]  # those that changed, in float64
    applied: Applied

    def finals(self, rewrites: Rewrites) -> Iterator[tuple[str, Tensor | None]]:
        """The final weights that `apply` yielded for these rewrites."""
        for name in dict.fromkeys(n for rewrite in rewrites.values() for n in rewrite.touches):
            yield name, self.weights.get(name)


@dataclass(frozen=True)
class Final:
    """A weight that no later rewrite changes, as it was computed; None if nothing changed it."""

    name: str
    value: FinalWeight | None


@dataclass(frozen=True)
class Stored:
    """A tensor as it is stored, by its name in the model."""

    name: str
    tensor: Tensor


@dataclass(frozen=True)
class Done:
    """The end of a part: the results of its rewrites, and its layers as they are stored."""

    applied: Applied
    layers: dict[str, SlimLayer]


Item = Final | Stored | Done


class Stream:
    """Every tensor of the new checkpoint, by its name in the model.

    A plan that was already applied (`made`) is not applied again. `windows` receive every weight that they compare.
    The results of the rewrites (`applied`) and the stored `layers` are complete when the stream ends.
    """

    def __init__(
        self, job: ReductionJob, rewrites: Rewrites, made: Made | None = None, windows: Windows | None = None
    ) -> None:
        self.job, self.rewrites, self.made, self.windows = job, rewrites, made, windows
        self.applied, self.layers = Applied(), dict[str, SlimLayer]()

    def tensors(self, progress: Progress) -> Generator[tuple[str, Tensor]]:
        wanted = self.windows.wanted if self.windows is not None else set()
        jobs = split_into_parts(self.job, self.rewrites, self.made, wanted)
        with closing(in_order(jobs, workers(), held_bytes, ROOM)) as items:
            for item in items:
                if isinstance(item, Stored):
                    yield item.name, item.tensor
                elif isinstance(item, Final):
                    assert self.windows is not None
                    self.windows.feed(item.name, item.value)
                else:
                    self.applied.results.update(item.applied.results)
                    self.layers.update(item.layers)
                    progress(f"writing: {len(self.applied.results)} of {len(self.rewrites)} rewrites")


def split_into_parts(
    job: ReductionJob, rewrites: Rewrites, made: Made | None, wanted: set[str]
) -> list[Callable[[], Iterator[Item]]]:
    """One part for every group of rewrites that shares no module with others, then one for every untouched weight."""
    groups, names = independent(rewrites), Names(job)
    touched = {module_of(n) for group in groups for rewrite in group.values() for n in rewrite.touches}
    rest = [n for n in job.checkpoint.names if module_of(n) not in touched]
    changed: list[Callable[[], Iterator[Item]]] = [partial(rewrite_group, job, g, names, made, wanted) for g in groups]
    return [*changed, *(partial(copy_untouched, job, name) for name in rest)]


def held_bytes(item: Item) -> int:
    value = item.tensor if isinstance(item, Stored) else item.value if isinstance(item, Final) else None
    return value.numel() * value.dtype.itemsize if isinstance(value, Tensor) else 0


class Names:
    """Stored names by the module that holds them."""

    def __init__(self, job: ReductionJob) -> None:
        self.by_module: dict[str, list[tuple[int, str]]] = defaultdict(list)
        for place, name in enumerate(job.checkpoint.names):
            self.by_module[module_of(name)].append((place, name))

    def of(self, modules: Iterable[str]) -> list[str]:
        """In the order of the checkpoint."""
        return [name for _, name in sorted(pair for m in modules for pair in self.by_module.get(m, ()))]


def copy_untouched(job: ReductionJob, name: str) -> Iterator[Item]:
    """Copy a weight unchanged: read it once, check it for NaN, write it."""
    yield Stored(name, require_finite(name, job.checkpoint.read(name)))


def rewrite_group(
    job: ReductionJob, rewrites: Rewrites, names: Names, made: Made | None, wanted: set[str]
) -> Iterator[Item]:
    """The modules that these rewrites touch, each as soon as all its weights are final."""
    group = ModuleGroup(job, names, Applied() if made is None else made.applied.at(rewrites))
    weights = Weights(job.read, scale_final=scale_and_round(job.precision))
    finals = apply(rewrites, weights, group.applied) if made is None else made.finals(rewrites)
    incomplete = IncompleteModules(rewrites.values())
    for name, value in finals:
        if value is not None:
            group.ready[name] = value.rounded if isinstance(value, ScaledWeight) else value.to(job.precision(name))
        if name in wanted:
            yield Final(name, value)
        del value  # in float64 it is four times as large
        for modules in incomplete.completed_by(name):
            yield from group.finish(modules)
    yield Done(group.applied, group.layers)


@dataclass
class ModuleGroup:
    """Modules that are rewritten together: the weights that are final, and the layers that are complete."""

    job: ReductionJob
    names: Names
    applied: Applied
    ready: dict[str, Tensor] = field(default_factory=dict)
    layers: dict[str, SlimLayer] = field(default_factory=dict)

    def finish(self, modules: set[str]) -> Iterator[Item]:
        """The stored tensors of complete modules, in their own precision."""
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
        stored = {*self.names.of(modules), *replaced}
        for name in [n for n in self.ready if module_of(n) in modules]:
            assert name in stored, f"{name} was rewritten and would not be stored"
            del self.ready[name]

    def whole(self, name: str) -> Tensor:
        return self.ready[name] if name in self.ready else require_finite(name, self.job.read(name))


class IncompleteModules:
    """The modules some of whose weights are not final yet, in sets that must be stored together."""

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

    def completed_by(self, name: str) -> Iterator[set[str]]:
        """The modules that are complete now that this weight is final."""
        number = self.unit_of[module_of(name)]
        self.waiting[number].discard(name)
        if not self.waiting[number]:
            yield self.groups[number]


def path_of(fact: Fact) -> str:
    return fact.module if isinstance(fact, Passed) else module_of(fact.parameter)
