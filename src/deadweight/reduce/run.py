"""The reduction, stage by stage: prove, plan, apply, verify, write."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import psutil
import torch
from torch import nn

from deadweight.audit.run import prove_claims, trace_source
from deadweight.errors import DeadweightError
from deadweight.graph.evaluate import float64_default
from deadweight.graph.node import Graph
from deadweight.graph.trace import TraceError, tied_names
from deadweight.laws.catalogue import Catalogue, every_law
from deadweight.progress import Progress, silent
from deadweight.reduce.comparison import LENGTH, ComparedModel, prepare_comparison, prepare_with_signals
from deadweight.reduce.error_limits import require_same
from deadweight.reduce.job import ReductionJob, summarise_applied, summarise_plan
from deadweight.reduce.layer_windows import open_windows
from deadweight.reduce.plan import Layout, Request, Skipped, every_place, make_plan
from deadweight.reduce.result import Reduction
from deadweight.reduce.stored_tensors import Stream
from deadweight.reduce.trial import Trial
from deadweight.reduce.unfit_models import refuse_unfit
from deadweight.reduce.write import Destination, write
from deadweight.save.atomic_folder import check_out, check_space, resolve_path
from deadweight.save.slim_layout import can_shrink, tied_parameters
from deadweight.search.prover import Prover
from deadweight.source.checkpoint import Checkpoint, FileCheckpoint, ModuleCheckpoint, forget_copies, open_checkpoint
from deadweight.source.examples import left_out
from deadweight.source.hugging_face_config import local_folder
from deadweight.source.model import ModelSpec, Source
from deadweight.source.printable import printable
from deadweight.source.tokens import text_pieces
from deadweight.source.type_aliases import ExampleInputs, ModelLike
from deadweight.threads import one_thread, threads_for

IN_PARTS = "original and reduced model do not fit into memory together: compared in float64, a few layers at a time"
NOT_CHECKED = (
    "original and reduced model do not fit into memory together, and the model has no repeated blocks that could be "
    "compared a few at a time: the rewrites are proved, but the result was NOT compared with the original; use "
    "`deadweight verify` on a larger machine"
)
BYTES_PER_PARAMETER = 32  # of original and reduced model, each in its own precision and in float64


def reduce(
    model: ModelLike,
    out: str | Path | None = None,
    *,
    layout: Layout = "slim",
    select: str | Sequence[str] | None = None,
    ignore: str | Sequence[str] | None = None,
    dry_run: bool = False,
    overwrite: bool = False,
    inputs: ExampleInputs = None,
    trust_remote_code: bool = False,
    laws: Catalogue | None = None,
    progress: Progress = silent,
) -> Reduction:
    """Remove what is proved redundant from a model, check that the function is the same, and write it to OUT.

    With an nn.Module and no OUT, the reduced module is in the result's `module`. `laws` replaces the catalogue of all
    laws.
    """
    if layout not in ("stock", "slim"):
        raise DeadweightError(f"found layout={layout!r}; expected 'stock' or 'slim'")
    if out is None and not dry_run and not isinstance(model, nn.Module):
        raise DeadweightError("no folder to write to; expected OUT, or dry_run=True")
    start = time.perf_counter()
    destination = Destination(None if out is None else resolve_path(out), overwrite)
    if destination.folder is not None and not dry_run:
        check_out(destination.folder, model, overwrite=overwrite)
    spec = ModelSpec(model, inputs, trust_remote_code)
    laws = laws or every_law()
    request = Request(layout, frozenset(laws.codes(select) or ()), frozenset(laws.codes(ignore) or ()), laws)
    with one_thread():
        spec = spec.built_once()
        job = prepare(spec, request, progress, weights=not dry_run)
    if destination.folder is not None and not dry_run:
        check_space(destination.folder, job.checkpoint.bytes)
    with threads_for(job.size):
        result = summarise_plan(job) if dry_run else carry_out(job, spec, destination, progress)
    return replace(result, seconds=time.perf_counter() - start)


def prepare(spec: ModelSpec, request: Request, progress: Progress, *, weights: bool) -> ReductionJob:
    """Prove what can be proved of the model, and plan. Evidence is not taken: the whole result is verified later.

    The model is opened once, without weights, with one block of each kind. It is opened again only where this one is
    not enough: with all its blocks, for laws that change the basis of the whole residual stream; or built, without
    being run or traced, because the layout of the result has all blocks. Weights are loaded last (`comparison_of`):
    most of the plan needs none.
    """
    source, graph = open_and_trace(spec, progress, collapsed=True, weights=weights)
    result = prove_claims(graph, request.laws, progress)
    if any(request.laws.law_of(c).needs_all_blocks for c in result.claims) and source.blocks:
        source, graph = open_and_trace(spec, progress, collapsed=False, weights=weights)
        result = prove_claims(graph, request.laws, progress)
    whole = source.module if not source.blocks else spec.whole_module()
    progress("planning")
    tied = tied_parameters(whole)
    shrinks = lambda name, is_whole: can_shrink(whole, name, tied, whole=is_whole)  # noqa: E731
    plan = make_plan(source, graph, result.claims, request, shrinks)
    plan.skipped += refusals(source, result.prover, request)
    del result  # the proofs of long sequences hold gigabytes, in reference cycles
    gc.collect()
    if not weights:  # shapes are enough for a plan
        return ReductionJob(source, whole, graph, plan, ModuleCheckpoint(whole), request.layout, None)
    checkpoint, folder = weights_of(spec, source, graph, whole)
    return ReductionJob(source, whole, graph, plan, checkpoint, request.layout, folder)


def open_and_trace(
    spec: ModelSpec, progress: Progress, *, collapsed: bool, weights: bool = True
) -> tuple[Source, Graph]:
    """The model without weights, and its graph; raises if it cannot be reduced.

    If its weights are needed later, their shapes are compared with the config's before the work.
    """
    progress("opening the model")
    source = spec.open(collapsed=collapsed)
    refuse_unfit(source)
    if weights:
        stored_weights(spec, source, tied_names(source.module))
    try:
        progress("tracing")
        source, graph = trace_source(source, spec, pieces=False)  # weights are rewritten whole
    except TraceError as error:
        name = printable(source.name)
        raise DeadweightError(f"{name} cannot be traced, so nothing can be proved about it: {error}") from error
    if graph.specialised:
        name = printable(source.name)
        raise DeadweightError(
            f"{name} is not reduced: proofs would hold for one path of its code only: {graph.specialised[0]}"
        )
    return source, graph


def refusals(source: Source, prover: Prover, request: Request) -> list[Skipped]:
    """Where the laws that were selected by name do not hold, and why."""
    return [
        Skipped(*law.title, place, why)
        for law in request.laws.laws
        if law.refusals is not None and request.select & set(law.title)
        for node, why in law.refusals(prover)
        for place in every_place(source, prover.graph.parameters[node])
    ]


def weights_of(spec: ModelSpec, source: Source, graph: Graph, whole: nn.Module) -> tuple[Checkpoint, Path | None]:
    """The weights in their files, which are read one by one.

    If the names there are not the model's own, or the files are no safetensors, the model is loaded here: what
    transformers makes of the names is only known then.
    """
    checkpoint, folder = stored_weights(spec, source, graph.tied)
    if checkpoint is not None:
        forget_copies(checkpoint, tied_names(whole))
        return checkpoint, folder
    if source.has_weights:
        return ModuleCheckpoint(whole), folder
    return ModuleCheckpoint(spec.open_complete().module), folder


def stored_weights(
    spec: ModelSpec, source: Source, tied: Mapping[str, tuple[str, ...]]
) -> tuple[FileCheckpoint | None, Path | None]:
    """The weights in the model's folder, if they have its names, and the folder; raises if their shapes differ."""
    folder = None if isinstance(spec.model, nn.Module) else local_folder(str(spec.model))
    spare = [n for first, others in tied.items() for n in (first, *others)]
    return None if folder is None else open_checkpoint(folder, source.shapes, spare), folder


def carry_out(job: ReductionJob, spec: ModelSpec, destination: Destination, progress: Progress) -> Reduction:
    """Apply the plan to the whole model in memory if it fits; else tensor by tensor, from file to file."""
    full = comparison_of(job, spec, progress)
    if full is not None:
        trial = Trial(job, full, prepare_with_signals(full))
        return try_and_write(job, trial, destination, progress)
    windows = open_windows(job, job.plan.rewrites, progress)
    notes = (*job.source.notes, *unseen_signals(job.source), IN_PARTS if windows is not None else NOT_CHECKED)
    result = replace(summarise_plan(job), out=destination.folder, notes=notes)
    stream = Stream(job, dict(enumerate(job.plan.rewrites)), windows=windows)
    progress("writing and verifying")
    with set_thread_defaults(), windows or nullcontext():
        if destination.folder is not None:
            return write(stream, result, destination, progress)
        for _ in stream.tensors(progress):
            pass
        verification = None if windows is None else require_same(windows.verification())
    return summarise_applied(job, replace(result, verification=verification), stream.applied)


def try_and_write(job: ReductionJob, trial: Trial, destination: Destination, progress: Progress) -> Reduction:
    """Try the plan on the model in memory, leave out what adds too much rounding, and write the weights of the trial.

    The plan is applied once, as a whole. Only if that adds too much rounding is it applied again, law by law. The
    weights of the last trial that fits are written; they are not computed again.
    """
    progress("measuring the model's own rounding noise")
    tried, left_out = trial.within_noise(dict(enumerate(job.plan.rewrites)), progress)
    progress("verifying")
    module = trial.build_module(tried)
    result = replace(
        summarise_plan(job),
        verification=require_same(trial.verify(tried, module)),
        notes=(*job.source.notes, *(() if len(trial.compared) > 1 else unseen_signals(trial.full.source))),
        skipped=(*job.plan.skipped, *left_out),
        out=destination.folder,
        module=module,
    )
    if destination.folder is not None:
        progress("writing")
        return write(Stream(job, tried.rewrites, tried.made), result, destination, progress)
    parameters = sum(p.numel() for p in module.parameters())
    return replace(summarise_applied(job, result, tried.made.applied), parameters_after=parameters)


def unseen_signals(source: Source) -> tuple[str, ...]:
    """A note on the images or the sound that the model accepts and is not compared on."""
    absent = left_out(source.module, source.inputs) if source.config is not None else ()
    words = " or ".join(absent)
    return (f"proved and compared only without {words}: check the result on inputs that have them",) if absent else ()


@contextmanager
def set_thread_defaults() -> Iterator[None]:
    """Set once what all threads of torch share: the default dtype and the random number generator."""
    with float64_default(), torch.random.fork_rng(devices=[]):
        yield


def comparison_of(job: ReductionJob, spec: ModelSpec, progress: Progress) -> ComparedModel | None:
    """The whole model with its weights, traced, if it and the reduced one fit into memory together; else None.

    The model that was proved has neither weights nor all blocks, and its example is as short as proofs allow. So the
    model that is compared in numbers is opened and traced separately, once, on longer inputs. A model that does not run
    on them is opened again with its default inputs.
    """
    if job.size * BYTES_PER_PARAMETER > free_memory() * 0.7:
        return None
    progress("loading the weights")
    text = text_pieces(job.folder) if job.folder is not None else ()
    for length in (LENGTH, None) if job.source.config is not None and spec.inputs is None else (None,):
        try:
            return prepare_comparison(replace(spec, length=length).open_complete(), text)
        except (DeadweightError, TraceError):
            if length is None:
                raise
    return None


def free_memory() -> int:
    """Bytes that are available without swapping."""
    return int(psutil.virtual_memory().available)
