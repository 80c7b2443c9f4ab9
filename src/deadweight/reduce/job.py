"""A model with the plan of its reduction: what every later stage needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from deadweight.errors import DeadweightError
from deadweight.graph.node import Graph
from deadweight.reduce.apply import Applied
from deadweight.reduce.plan import Layout, Plan
from deadweight.reduce.result import Reduction, describe_rewrite
from deadweight.rewrite.rewrite import Rewrite
from deadweight.source.checkpoint import EVERY, Checkpoint
from deadweight.source.checkpoint_files import read_json
from deadweight.source.model import Source
from deadweight.source.printable import printable


@dataclass(frozen=True)
class ReductionJob:
    """A model with the plan of its reduction, and where its weights are."""

    source: Source  # without weights, repeated blocks cut
    whole: nn.Module  # with all blocks, without weights unless the user gave a module
    graph: Graph
    plan: Plan
    checkpoint: Checkpoint
    layout: Layout
    folder: Path | None

    @cached_property
    def loaded(self) -> torch.dtype | None:
        """The precision that the folder's config sets."""
        file = None if self.folder is None else self.folder / "config.json"
        raw = read_json(file) if file is not None and file.is_file() else {}
        dtype = getattr(torch, str(raw.get("dtype", raw.get("torch_dtype"))).removeprefix("torch."), None)
        return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else None

    @property
    def size(self) -> int:
        return sum(torch.Size(s).numel() for s in self.source.shapes.values())

    def read(self, name: str, rows: slice = EVERY) -> Tensor:
        """A weight, or some of its rows, in its own precision; tied weights are found under any of their names."""
        return self.checkpoint.read(self.stored_name(name), rows)

    def precision(self, name: str) -> torch.dtype:
        """The precision in which a changed weight is stored: its own, or that of the config if it is wider.

        If a float32 model is stored in bfloat16, its weights need no more bits than that; rewritten ones do.
        """
        stored = self.checkpoint.dtype(self.stored_name(name))
        return stored if self.loaded is None else torch.promote_types(stored, self.loaded)

    def stored_name(self, name: str) -> str:
        if name in self.checkpoint:
            return name
        for first, others in self.graph.tied.items():
            for alias in (first, *others):
                if name in (first, *others) and alias in self.checkpoint:
                    return alias
        raise DeadweightError(
            f"{printable(name)} is not in the checkpoint; expected it there, because the model needs it"
        )


def summarise_plan(job: ReductionJob) -> Reduction:
    """The result of a plan that was not applied."""
    likely = expected_rewrites(job.plan.rewrites)
    steps = tuple(describe_rewrite(r) for r in likely)
    before = job.size
    saved = sum(s.saves for s in steps) if job.layout == "slim" else 0
    return Reduction(
        model=job.source.name,
        layout=job.layout,
        steps=steps,
        skipped=tuple(job.plan.skipped),
        parameters_before=before,
        parameters_after=before - saved,
        bytes_before=job.checkpoint.bytes,
        flops_saved=flops(job, likely),
        notes=job.source.notes,
    )


def expected_rewrites(rewrites: Sequence[Rewrite]) -> list[Rewrite]:
    """The rewrites that are expected to succeed: no change of basis of a matrix that becomes the identity."""
    whole = {r.target for r in rewrites if r.makes_identity}
    return [r for r in rewrites if r.makes_identity or not whole.intersection(r.touches)]


def flops(job: ReductionJob, rewrites: Iterable[Rewrite]) -> int:
    """FLOPs saved per token: two for every weight of a matrix that is no longer stored."""
    if job.layout == "stock":
        return 0
    matrices = [r.saves for r in rewrites if len(job.source.shapes.get(r.target, (1,))) > 1]
    return 2 * sum(matrices)


def summarise_applied(job: ReductionJob, reduction: Reduction, applied: Applied) -> Reduction:
    """The result with the rewrites that were applied."""
    steps = tuple(describe_rewrite(r) for r in applied.done)
    saved = sum(s.saves for s in steps) if job.layout == "slim" else 0
    return replace(
        reduction,
        steps=steps,
        skipped=(*reduction.skipped, *applied.skipped),
        parameters_after=reduction.parameters_before - saved,
        flops_saved=flops(job, applied.done),
    )
