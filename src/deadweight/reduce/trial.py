"""Trying a plan on the whole model in memory: rewrites that add too much rounding are left out, the rest verified."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from deadweight.errors import DeadweightError
from deadweight.progress import Progress
from deadweight.reduce.apply import Applied, Rewrites, ScaledWeight, Weights, apply, independent, require_finite
from deadweight.reduce.comparison import (
    ComparedModel,
    Read,
    in_float64,
    in_own_precision,
    names_of,
    outputs_of_original,
    relative,
)
from deadweight.reduce.error_limits import FLOORS, Error, Noise, Verification, noise_floor
from deadweight.reduce.job import ReductionJob
from deadweight.reduce.ordered_threads import in_order
from deadweight.reduce.plan import Skipped
from deadweight.reduce.stored_tensors import Made
from deadweight.rewrite.rewrite import Rewrite
from deadweight.save.facts import Fact
from deadweight.save.slim_layout import layout as slim_layout
from deadweight.slim.layers import install
from deadweight.source.printable import printable, reason
from deadweight.threads import workers


@dataclass(frozen=True)
class Tried:
    """Rewrites that were applied in memory."""

    rewrites: Rewrites
    made: Made
    noise: list[Noise]  # the rounding error of each output, before and after

    @property
    def fits(self) -> bool:
        return all(n.small for n in self.noise)


class Trial:
    """Trying rewrites on the whole model in memory."""

    def __init__(self, job: ReductionJob, full: ComparedModel, with_signals: ComparedModel | None = None) -> None:
        self.job, self.full = job, full
        self.compared = (full,) if with_signals is None else (full, with_signals)
        self.check_weights()
        self.truth = [outputs_of_original(one, self.original) for one in self.compared]
        self.floor = self.floors(self.errors(self.original, rounding=True))

    def errors(self, read: Read, *, rounding: bool = False) -> list[float]:
        """Of every output, on all kinds of inputs."""
        pairs = zip(self.compared, self.truth, strict=True)
        return [e for one, truth in pairs for e in relative(in_float64(one, read, rounding=rounding), truth)]

    def own_errors(self, outputs: Callable[[ComparedModel], list[list[Tensor]]]) -> list[float]:
        """The same of a model that runs in its own precision."""
        pairs = zip(self.compared, self.truth, strict=True)
        return [e for one, truth in pairs for e in relative(outputs(one), truth)]

    def floors(self, errors: Sequence[float]) -> list[float]:
        left, result = list(errors), list[float]()
        for one, truth in zip(self.compared, self.truth, strict=True):
            count = len(truth[0])
            result += noise_floor(one.graph, left[:count])
            left = left[count:]
        return result

    def original(self, name: str) -> Tensor:
        tensor = self.job.read(name)
        return tensor.to(torch.float64) if tensor.is_floating_point() else tensor

    def check_weights(self) -> None:
        """Raise if the weights in the files differ from those of the loaded model."""
        if self.job.folder is None:
            return
        for name, own in self.full.module.named_parameters():
            stored = require_finite(name, self.job.read(name))
            if not torch.equal(own.detach(), stored.to(own.device, own.dtype)):
                raise DeadweightError(
                    f"{printable(name)} in the files differs from the loaded model's; expected a folder with one "
                    "checkpoint, saved by the model's own save_pretrained"
                )

    def within_noise(self, rewrites: Rewrites, progress: Progress) -> tuple[Tried, list[Skipped]]:
        """The rewrites that together stay within three noise floors, and those that are left out."""
        best = self.try_rewrites(rewrites)
        if best.fits:
            return best, []
        best = self.try_rewrites({})
        for code in sorted({r.claim.code for r in rewrites.values()}):
            progress(f"measuring {code}")
            mine = {n: r for n, r in rewrites.items() if r.claim.code == code}
            attempts = (self.try_rewrites(in_place_order(best.rewrites | m)) for m in with_tighter_limits(mine))
            best = next((t for t in attempts if t.fits), best)
        why = f"it would exceed {FLOORS:g} times the rounding noise of the model's own precision"
        left = [r for n, r in rewrites.items() if n not in best.rewrites]
        return best, [Skipped(r.claim.code, r.claim.name, r.target, why, r.claim.dof) for r in by_law(left)]

    def try_rewrites(self, rewrites: Rewrites) -> Tried:
        """Apply these rewrites, and measure the rounding errors of the result."""
        made = self.apply_rewrites(rewrites)
        if not rewrites:
            return Tried(rewrites, made, [Noise(f, f) for f in self.floor])

        def stored(name: str) -> Tensor:
            return made.weights[name].to(self.job.precision(name)) if name in made.weights else self.job.read(name)

        return Tried(rewrites, made, list(map(Noise, self.errors(stored, rounding=True), self.floor)))

    def apply_rewrites(self, rewrites: Rewrites) -> Made:
        """Every weight that these rewrites change, in float64, computed on all threads."""
        applied = Applied()
        jobs = [partial(apply, group, Weights(self.job.read), applied) for group in independent(rewrites)]
        with closing(in_order(jobs, workers(), lambda _: 0, 1)) as finals:
            return Made({n: v for n, v in finals if v is not None and not isinstance(v, ScaledWeight)}, applied)

    def verify(self, tried: Tried, module: nn.Module) -> Verification:
        """Compare `module`, the reduced model as it will be loaded, with the original: in float64, and as it runs."""
        weights = tried.made.weights

        def reduced(name: str) -> Tensor:
            return weights[name] if name in weights else self.original(name)

        floor = self.floors(self.own_errors(lambda one: in_own_precision(one.module, one.calls, one.source.inputs)))
        own = self.own_errors(partial(self.outputs, module))
        names = [n for one, truth in zip(self.compared, self.truth, strict=True) for n in names_of(one, len(truth[0]))]
        rows = zip(names, self.errors(reduced), own, floor, tried.noise, strict=True)
        words = " and ".join(one.words for one in self.compared)
        return Verification(tuple(Error(*row) for row in rows), words)

    def outputs(self, module: nn.Module, one: ComparedModel) -> list[list[Tensor]]:
        """The outputs of the reduced model; raises if its code reads parameters that its layers no longer have."""
        try:
            return in_own_precision(module, one.calls, one.source.inputs)
        except DeadweightError as error:
            raise DeadweightError(
                f"without the redundant parameters {error}: its code reads some of them outside their layers; use "
                "--layout stock (layout='stock'), which keeps them"
            ) from error

    def build_module(self, tried: Tried) -> nn.Module:
        """The model as it will be loaded."""
        weights, applied = tried.made.weights, tried.made.applied
        return self.build_slim(weights, applied.facts) if self.job.layout == "slim" else self.build_dense(weights)

    def build_dense(self, weights: dict[str, Tensor]) -> nn.Module:
        """The original class with these weights, in its own precision."""
        module = self.copy_original()
        copy_into(module, weights)
        return module

    def copy_original(self) -> nn.Module:
        try:
            return copy.deepcopy(self.full.module)
        except Exception as error:  # whatever the user's module holds
            raise DeadweightError(
                f"{printable(self.full.source.name)} cannot be copied, and the reduced model is made from a copy "
                f"({reason(error)}); expected a module that copy.deepcopy accepts: remove hooks and old-style weight "
                "norms first (torch.nn.utils.remove_weight_norm)"
            ) from error

    def build_slim(self, weights: dict[str, Tensor], facts: Sequence[Fact]) -> nn.Module:
        """The original with the smaller layers of the slim checkpoint."""
        form = slim_layout(self.full.module, facts)
        module = self.copy_original()
        before = module.state_dict()

        def whole(name: str) -> Tensor:
            like = before[name]
            return weights[name].to(like.dtype) if name in weights else like

        install(module, form.spec)
        for path in form.layers:
            copy_into(module, form.tensors(path, whole))
        copy_into(module, {n: w for n, w in weights.items() if n not in form.replaces})
        return module.eval()


def copy_into(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy tensors into a module by name, in the module's precision."""
    own = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    with torch.no_grad():
        for name, value in tensors.items():
            own[name].copy_(value.to(own[name].dtype))


def in_place_order(rewrites: Rewrites) -> Rewrites:
    return dict(sorted(rewrites.items()))


def with_tighter_limits(law: Rewrites) -> Iterator[Rewrites]:
    """All rewrites of one law; then the same with tighter limits, as long as each of them has one."""
    yield law
    tighter = [
        dict(zip(law, each, strict=True))
        for each in zip(*(r.with_tighter_limits() for r in law.values()), strict=False)
    ]
    yield from tighter


def by_law(rewrites: Sequence[Rewrite]) -> list[Rewrite]:
    return sorted(rewrites, key=lambda r: r.claim.code)
