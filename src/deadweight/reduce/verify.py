"""Are two checkpoints the same function? It does not matter which tool wrote them."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from deadweight.errors import DeadweightError
from deadweight.graph.trace import TraceError
from deadweight.progress import Progress, silent
from deadweight.reduce.comparison import LENGTH, ComparedModel, compare, prepare_comparison, prepare_with_signals
from deadweight.reduce.error_limits import Verification
from deadweight.source.hugging_face_config import local_folder
from deadweight.source.model import ModelSpec
from deadweight.source.printable import printable
from deadweight.source.tokens import text_pieces
from deadweight.source.type_aliases import ExampleInputs, ModelLike
from deadweight.threads import one_thread, threads_for


def verify(
    a: ModelLike,
    b: ModelLike,
    *,
    inputs: ExampleInputs = None,
    trust_remote_code: bool = False,
    progress: Progress = silent,
) -> Verification:
    """Compare B with A on random inputs (and text, where A has a tokenizer): in float64, and in their own precision."""
    with one_thread():
        specs = (ModelSpec(a, inputs, trust_remote_code), ModelSpec(b, inputs, trust_remote_code))
        first, second = open_both(*specs, progress)
    progress("comparing")
    with threads_for(sum(p.numel() for p in first.module.parameters())):
        result, more = compare(first, second), both_with_signals(first, second)
        if more is None:
            return result
        signals = compare(*more)
        return Verification((*result.errors, *signals.errors), f"{result.inputs} and {signals.inputs}")


def both_with_signals(a: ComparedModel, b: ComparedModel) -> tuple[ComparedModel, ComparedModel] | None:
    """Both models on inputs with the images or the sound that the example leaves out."""
    first = prepare_with_signals(a)
    second = None if first is None else prepare_with_signals(b)
    return None if first is None or second is None else (first, second)


def open_both(a: ModelSpec, b: ModelSpec, progress: Progress) -> tuple[ComparedModel, ComparedModel]:
    """Both models, traced on inputs of the same length: 24 tokens, or, where one of them cannot, the default length."""
    for length in (LENGTH, None) if a.inputs is None else (None,):
        try:
            progress("loading the first model")
            first = open_one(replace(a, length=length))
            progress("loading the second model")
            return first, open_one(replace(b, length=length))
        except (DeadweightError, TraceError) as error:
            if length is None:
                raise DeadweightError(str(error)) from error
    raise AssertionError("unreachable")


def open_one(spec: ModelSpec) -> ComparedModel:
    folder = None if isinstance(spec.model, nn.Module) else local_folder(str(spec.model))
    text = text_pieces(folder) if folder is not None else ()
    source = spec.open_complete()
    try:
        return prepare_comparison(source, text)
    except TraceError as error:
        raise TraceError(f"{printable(source.name)} cannot be traced: {error}") from error
