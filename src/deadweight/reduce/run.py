"""The reduction, stage by stage: prove, plan, apply, verify, write."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import psutil
import torch
from torch import nn

from deadweight.audit.run import proved, traced
from deadweight.errors import DeadweightError
from deadweight.graph.evaluate import float64_default
from deadweight.graph.node import Graph
from deadweight.graph.trace import TraceError, tied_names
from deadweight.laws.catalogue import Catalogue, every_law
from deadweight.progress import Progress, silent
from deadweight.reduce.job import Job, planned, settled
from deadweight.reduce.parts import Stream
from deadweight.reduce.plan import Layout, Request, Skipped, every_place, make_plan
from deadweight.reduce.result import Reduction
from deadweight.reduce.trial import Trial
from deadweight.reduce.verify import (
    LENGTH,
    Subject,
    accepted,
    subject,
)
from deadweight.reduce.windows import open_windows
from deadweight.reduce.write import Target, write
from deadweight.save.folder import check_out, check_space, followed
from deadweight.save.layout import can_shrink, tied_parameters
from deadweight.search.prover import Prover
from deadweight.slim.load import is_slim
from deadweight.source.checkpoint import Checkpoint, ModuleCheckpoint, forget_copies, open_checkpoint
from deadweight.source.hugging import ADAPTER, MERGE, QUANTISED, local_folder
from deadweight.source.kinds import ExampleInputs, ModelLike, Options
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
    model: ModelLike,
    out: str | Path | None = None,
    *,
    layout: Layout = "slim",
    select: Sequence[str] | None = None,
    ignore: Sequence[str] | None = None,
    dry_run: bool = False,
    overwrite: bool = False,
    inputs: ExampleInputs = None,
    trust_remote_code: bool = False,
    laws: Catalogue | None = None,
    progress: Progress = silent,
) -> Reduction:
    """Take out of a model what was proved redundant, check that it is the same function, and write it to OUT.

    With an nn.Module and no OUT, the reduced module is in the result's `module`. `laws` are those of the catalogue
    unless others are given.
    """
    if layout not in ("stock", "slim"):
        raise DeadweightError(f"found layout={layout!r}; expected 'stock' or 'slim'")
    if out is None and not dry_run and not isinstance(model, nn.Module):
        raise DeadweightError("no folder to write to; expected OUT, or dry_run=True")
    start, say = time.perf_counter(), progress
    target = Target(None if out is None else followed(out), overwrite)
    if target.folder is not None and not dry_run:
        check_out(target.folder, model, overwrite=overwrite)
    options = {"inputs": inputs, "trust_remote_code": trust_remote_code}
    request = Request(layout, frozenset(select or ()), frozenset(ignore or ()), laws or every_law())
    with one_thread():
        job = prepare(model, request, options, say, weights=not dry_run)
    if target.folder is not None and not dry_run:
        check_space(target.folder, job.checkpoint.bytes)
    with threads_for(job.size):
        result = planned(job) if dry_run else carried_out(job, model, options, target, say)
    return replace(result, seconds=time.perf_counter() - start)


def prepare(model: ModelLike, request: Request, options: Options, say: Progress, *, weights: bool) -> Job:
    """Prove what can be proved of the model, and plan. Evidence is not taken: the whole result is verified later.

    The model is opened on shapes alone, with one block for each kind. It is opened a second time only for what that one
    lacks: with all its blocks in place for laws that move the whole stream, or built, neither run nor traced, for the
    layout of the result, which has all blocks. Weights come last (`affordable`), since most plans need none.
    """
    source, graph = open_and_trace(model, options, say, collapsed=True)
    result = proved(graph, request.laws, say)
    if any(request.laws.law_of(c).needs_all_blocks for c in result.claims) and source.blocks:
        source, graph = open_and_trace(model, options, say, collapsed=False)
        result = proved(graph, request.laws, say)
    whole = source.module if not source.blocks else whole_module(model, trust_remote_code=options["trust_remote_code"])
    say("planning")
    tied = tied_parameters(whole)
    shrinks = lambda name, is_whole: can_shrink(whole, name, tied, whole=is_whole)  # noqa: E731
    plan = make_plan(source, graph, result.claims, request, shrinks)
    plan.skipped += refusals(source, result.prover, request)
    del result  # walks over long sequences hold gigabytes, in cycles
    gc.collect()
    if not weights:  # shapes are enough for a plan
        return Job(source, whole, graph, plan, ModuleCheckpoint(whole), request.layout, None)
    checkpoint, folder = weights_of(model, source, graph, whole, options)
    return Job(source, whole, graph, plan, checkpoint, request.layout, folder)


def open_and_trace(model: ModelLike, options: Options, say: Progress, *, collapsed: bool) -> tuple[Source, Graph]:
    """The model on shapes alone, if it is one that can be reduced, with its graph."""
    say("opening the model")
    source = open_model(model, collapsed=collapsed, **options)
    refuse_unfit(source)
    try:
        say("tracing")
        trusted = {"trust_remote_code": options["trust_remote_code"]}
        source, graph = traced(source, model, options["inputs"], trusted, pieces=False)  # weights are rewritten whole
    except TraceError as error:
        name = printable(source.name)
        raise DeadweightError(f"{name} cannot be traced, so nothing is proved of it: {error}") from error
    if graph.specialised:
        name = printable(source.name)
        raise DeadweightError(f"{name} is proved for one path only and not reduced: {graph.specialised[0]}")
    return source, graph


def refusals(source: Source, prover: Prover, request: Request) -> list[Skipped]:
    """Who asks for a law by name is told where it does not hold, and why."""
    return [
        Skipped(*law.title, place, why)
        for law in request.laws.laws
        if law.refusals is not None and request.select & set(law.title)
        for node, why in law.refusals(prover)
        for place in every_place(source, prover.graph.parameters[node])
    ]


def refuse_unfit(source: Source) -> None:
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
    model: ModelLike, source: Source, graph: Graph, whole: nn.Module, options: Options
) -> tuple[Checkpoint, Path | None]:
    """The weights where they lie; or, if their names there are not the model's own, loaded."""
    folder = None if isinstance(model, nn.Module) else local_folder(str(model))
    if folder is not None:
        spare = [n for first, others in graph.tied.items() for n in (first, *others)]
        checkpoint = open_checkpoint(folder, source.shapes, spare)
        if checkpoint is not None:
            forget_copies(checkpoint, tied_names(whole))
            return checkpoint, folder
    if source.has_weights:
        return ModuleCheckpoint(whole), folder
    return ModuleCheckpoint(open_complete(model, **options).module), folder


def carried_out(job: Job, model: ModelLike, options: Options, target: Target, say: Progress) -> Reduction:
    """The plan is applied to the whole model in memory, where it can be tried; else on its way from file to file."""
    full = affordable(job, model, options, say)
    if full is not None:
        return tried_and_written(job, Trial(job, full), target, say)
    windows = open_windows(job, job.plan.rewrites, say)
    notes = (*job.source.notes, IN_PARTS if windows is not None else NOT_CHECKED)
    result = replace(planned(job), out=target.folder, notes=notes)
    stream = Stream(job, dict(enumerate(job.plan.rewrites)), windows=windows)
    say("writing and verifying")
    with shared_by_threads(), windows or nullcontext():
        if target.folder is not None:
            return write(stream, result, target, say)
        for _ in stream.tensors(say):
            pass
        verification = None if windows is None else accepted(windows.verification())
    return settled(job, replace(result, verification=verification), stream.applied)


def tried_and_written(job: Job, trial: Trial, target: Target, say: Progress) -> Reduction:
    """Try the plan on the model in memory, leave out what exceeds its noise, and write what was tried.

    The plan is applied as a whole first. Only if that adds too much rounding is it applied again, law by law; what is
    written are the weights of the last trial that fits, and they are not computed again.
    """
    say("measuring the model's own noise")
    tried, left_out = trial.within_noise(dict(enumerate(job.plan.rewrites)), say)
    say("verifying")
    module = trial.module(tried)
    result = replace(
        planned(job),
        verification=accepted(trial.verify(tried, module)),
        notes=job.source.notes,
        skipped=(*job.plan.skipped, *left_out),
        out=target.folder,
        module=module,
    )
    if target.folder is not None:
        say("writing")
        return write(Stream(job, tried.rewrites, tried.made), result, target, say)
    parameters = sum(p.numel() for p in module.parameters())
    return replace(settled(job, result, tried.made.applied), parameters_after=parameters)


@contextmanager
def shared_by_threads() -> Iterator[None]:
    """What all threads share in torch is set once, outside: the default precision and the random numbers."""
    with float64_default(), torch.random.fork_rng(devices=[]):
        yield


def affordable(job: Job, model: ModelLike, options: Options, say: Progress) -> Subject | None:
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
