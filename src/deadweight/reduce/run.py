"""The reduction, stage by stage: prove, plan, apply, verify, write."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from deadweight.audit.run import proved, traced
from deadweight.errors import DeadweightError
from deadweight.graph.evaluate import float64_default
from deadweight.graph.node import Graph
from deadweight.graph.trace import TraceError, tied_names
from deadweight.laws import dw015_whole_projection
from deadweight.laws.prover import Prover
from deadweight.progress import Progress, silent
from deadweight.reduce.apply import Applied
from deadweight.reduce.job import Job, planned, settled
from deadweight.reduce.parts import stream
from deadweight.reduce.plan import Layout, Skipped, every_place, make_plan
from deadweight.reduce.result import Reduction
from deadweight.reduce.trial import Trial
from deadweight.reduce.verify import (
    LENGTH,
    Subject,
    accepted,
    subject,
)
from deadweight.reduce.windows import open_windows
from deadweight.reduce.write import write
from deadweight.save.folder import check_out, check_space, followed
from deadweight.save.layout import can_shrink, tied_parameters
from deadweight.slim.load import is_slim
from deadweight.source.checkpoint import Checkpoint, ModuleCheckpoint, forget_copies, open_checkpoint
from deadweight.source.hugging import ADAPTER, MERGE, QUANTISED, local_folder
from deadweight.source.model import Source, open_complete, open_model, whole_module
from deadweight.source.text import printable
from deadweight.source.tokens import text_pieces
from deadweight.threads import one_thread, threads_for

IN_PARTS = "the model does not fit into memory beside itself: checked in float64 on a few layers at a time"
NOT_CHECKED = (
    "the model does not fit into memory beside itself, and has no blocks that stand for each other: the rewrites are "
    "proved, but the result was NOT compared with the original; use `deadweight verify` on a larger machine"
)
BYTES_PER_PARAMETER = 32  # original and reduced, each in its own precision and in float64


def reduce(
    model: Any,
    out: str | Path | None = None,
    *,
    layout: Layout = "slim",
    select: Sequence[str] | None = None,
    ignore: Sequence[str] | None = None,
    dry_run: bool = False,
    overwrite: bool = False,
    inputs: Any = None,
    trust_remote_code: bool = False,
    progress: Progress = silent,
) -> Reduction:
    """Take out of a model what was proved redundant, check that it is the same function, and write it to OUT.

    With an nn.Module and no OUT, the reduced module is in the result's `module`.
    """
    if layout not in ("stock", "slim"):
        raise DeadweightError(f"found layout={layout!r}; expected 'stock' or 'slim'")
    if out is None and not dry_run and not isinstance(model, nn.Module):
        raise DeadweightError("no folder to write to; expected OUT, or dry_run=True")
    start, say = time.perf_counter(), progress
    target = None if out is None else followed(out)
    if target is not None and not dry_run:
        check_out(target, model, overwrite=overwrite)
    options = {"inputs": inputs, "trust_remote_code": trust_remote_code}
    with one_thread():
        job = prepare(model, layout, select or (), ignore or (), options, say, weights=not dry_run)
    if target is not None and not dry_run:
        check_space(target, job.checkpoint.bytes)
    with threads_for(job.size):
        found = planned(job) if dry_run else carried_out(job, model, options, target, overwrite, say)
    return replace(found, seconds=time.perf_counter() - start)


def prepare(
    model: Any, layout: Layout, select: Any, ignore: Any, options: dict[str, Any], say: Progress, *, weights: bool
) -> Job:
    """Prove what can be proved of the model, and plan. Evidence is not taken: the whole result is verified later."""
    say("opening the model")
    source = open_model(model, collapsed=True, **options)
    refuse_unfit(source, layout)
    try:
        say("tracing")
        trusted = {"trust_remote_code": options["trust_remote_code"]}
        source, graph = traced(source, model, options["inputs"], trusted, pieces=False)  # weights are rewritten whole
    except TraceError as error:
        raise DeadweightError(
            f"{printable(source.name)} cannot be traced, so nothing is proved of it: {error}"
        ) from error
    if graph.specialised:
        name = printable(source.name)
        raise DeadweightError(f"{name} is proved for one path only and not reduced: {graph.specialised[0]}")
    found = proved(source, graph, complete=False, say=say, evidence=False)
    if any(c.code == "DW015" for c in found.claims) and source.blocks:
        source = open_model(model, collapsed=False, **options)
        trusted = {"trust_remote_code": options["trust_remote_code"]}
        source, graph = traced(source, model, options["inputs"], trusted, pieces=False)  # weights are rewritten whole
        found = proved(source, graph, complete=False, say=say, evidence=False)
    # built again, and neither run nor traced: the blocks that were cut from the first are part of the result's layout
    whole = source.module if not source.blocks else whole_module(model, trust_remote_code=options["trust_remote_code"])
    say("planning")
    tied = tied_parameters(whole)
    shrinks = lambda name, is_whole: can_shrink(whole, name, tied, whole=is_whole)  # noqa: E731
    plan = make_plan(source, graph, found.claims, layout, select, ignore, shrinks)
    plan.skipped += whole_projections_kept(source, found.prover, select)
    del found  # walks over long sequences hold gigabytes, in cycles
    gc.collect()
    if not weights:  # shapes are enough for a plan
        return Job(source, whole, graph, plan, ModuleCheckpoint(whole), layout, None)
    checkpoint, folder = weights_of(model, source, graph, whole, options)
    return Job(source, whole, graph, plan, checkpoint, layout, folder)


def whole_projections_kept(source: Source, prover: Prover, select: Sequence[str]) -> list[Skipped]:
    """Who asks for whole projections by name is told of each why it stays."""
    if not {dw015_whole_projection.CODE, dw015_whole_projection.NAME} & set(select):
        return []
    return [
        Skipped(dw015_whole_projection.CODE, dw015_whole_projection.NAME, place, why)
        for node, why in dw015_whole_projection.refused(prover)
        for place in every_place(source, prover.graph.parameters[node])
    ]


def refuse_unfit(source: Source, layout: Layout) -> None:
    if is_slim(source.config):
        raise DeadweightError(f"{printable(source.name)} is slim already: deadweight has reduced it; use it as it is")
    if QUANTISED in source.notes and not source.name.endswith(".gguf"):
        raise DeadweightError(
            f"{printable(source.name)} is quantised; expected plain weights: reduce before quantising"
        )
    folder = Path(source.name).expanduser()
    if source.config is not None and (folder / ADAPTER).is_file():
        raise DeadweightError(f"{printable(source.name)} holds an adapter ({ADAPTER}) beside its weights; {MERGE}")
    if not source.shapes:
        raise DeadweightError(f"{printable(source.name)} has no parameters; expected a module with something to reduce")


def weights_of(
    model: Any, source: Source, graph: Graph, whole: nn.Module, options: dict[str, Any]
) -> tuple[Checkpoint, Path | None]:
    """The weights where they lie; or, if their names there are not the model's own, loaded."""
    folder = None if isinstance(model, nn.Module) else local_folder(str(model))
    if folder is not None:
        spare = [n for first, others in graph.tied.items() for n in (first, *others)]
        found = open_checkpoint(folder, source.shapes, spare)
        if found is not None:
            forget_copies(found, tied_names(whole))
            return found, folder
    if source.has_weights:
        return ModuleCheckpoint(whole), folder
    return ModuleCheckpoint(open_complete(model, **options).module), folder


def carried_out(
    job: Job, model: Any, options: dict[str, Any], out: Path | None, overwrite: bool, say: Progress
) -> Reduction:
    """The plan is applied once: on the whole model in memory, or on its way from file to file."""
    full = affordable(job, model, options, say)
    if full is not None:
        return tried_and_written(job, Trial(job, full), out, overwrite, say)
    rewrites, found = dict(enumerate(job.plan.rewrites)), replace(planned(job), out=out)
    windows = open_windows(job, job.plan.rewrites, say)
    found = replace(found, notes=(*job.source.notes, IN_PARTS if windows is not None else NOT_CHECKED))
    say("writing and verifying")
    with shared_by_threads(), windows or nullcontext():
        if out is not None:
            return write(job, rewrites, found, out, None, windows, overwrite=overwrite, say=say)
        applied = Applied()
        for _ in stream(job, rewrites, applied, {}, say, None, windows):
            pass
        verification = None if windows is None else accepted(windows.verification())
    return settled(job, replace(found, verification=verification), applied)


def tried_and_written(job: Job, trial: Trial, out: Path | None, overwrite: bool, say: Progress) -> Reduction:
    """Try the plan on the model in memory, leave out what exceeds its noise, and write what was tried."""
    say("measuring the model's own noise")
    tried, left_out = trial.within_noise(dict(enumerate(job.plan.rewrites)), say)
    say("verifying")
    module = trial.module(tried)
    found = replace(
        planned(job),
        verification=accepted(trial.verify(tried, module)),
        notes=job.source.notes,
        skipped=(*job.plan.skipped, *left_out),
        out=out,
        module=module,
    )
    if out is not None:
        say("writing")
        return write(job, tried.rewrites, found, out, tried.made, None, overwrite=overwrite, say=say)
    parameters = sum(p.numel() for p in module.parameters())
    return replace(settled(job, found, tried.made.applied), parameters_after=parameters)


@contextmanager
def shared_by_threads() -> Iterator[None]:
    """What all threads share in torch is set once, outside: the default precision and the random numbers."""
    with float64_default(), torch.random.fork_rng(devices=[]):
        yield


def affordable(job: Job, model: Any, options: dict[str, Any], say: Progress) -> Subject | None:
    """The whole model with its weights, traced, if it fits into memory beside its reduced self; else None.

    The model that was proved has neither weights nor all blocks, and its example is as short as proofs allow: what is
    compared in numbers is opened and traced by itself, on longer inputs.
    """
    if job.size * BYTES_PER_PARAMETER > free_memory() * 0.7:
        return None
    say("loading the weights")
    text = text_pieces(job.folder) if job.folder is not None else ()
    for length in (LENGTH, None) if job.source.config is not None and options["inputs"] is None else (None,):
        try:
            source = open_complete(model, length=length, **options)
            return subject(source, text)
        except (DeadweightError, TraceError):
            if length is None:
                raise
    return None


def free_memory() -> int:
    """Bytes that can be had without swapping."""
    return int(psutil.virtual_memory().available)
