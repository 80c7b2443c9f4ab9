"""Are two checkpoints, whoever made them, the same function?"""

from __future__ import annotations

from pathlib import Path

from torch import nn

from deadweight.errors import DeadweightError
from deadweight.graph.trace import TraceError
from deadweight.progress import Progress, silent
from deadweight.reduce.verify import LENGTH, Subject, Verification, compare, subject
from deadweight.source.hugging import local_folder
from deadweight.source.kinds import ExampleInputs, ModelLike
from deadweight.source.model import open_complete
from deadweight.source.tokens import text_pieces
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
        first, second = opened(a, b, inputs, trust_remote_code, progress)
    progress("comparing")
    with threads_for(sum(p.numel() for p in first.module.parameters())):
        return compare(first, second)


def opened(
    a: ModelLike, b: ModelLike, inputs: ExampleInputs, trust_remote_code: bool, say: Progress
) -> tuple[Subject, Subject]:
    """Both models, traced on inputs of one length: a long one, or, where one of them cannot, the shortest there is."""
    for length in (LENGTH, None) if inputs is None else (None,):
        try:
            say("loading the first model")
            first = one(a, inputs, length, trust_remote_code)
            say("loading the second model")
            return first, one(b, inputs, length, trust_remote_code)
        except (DeadweightError, TraceError) as error:
            if length is None:
                raise DeadweightError(str(error)) from error
    raise AssertionError("unreachable")


def one(model: ModelLike, inputs: ExampleInputs, length: int | None, trust_remote_code: bool) -> Subject:
    folder = None if isinstance(model, nn.Module) else local_folder(str(model))
    text = text_pieces(Path(folder)) if folder is not None else ()
    return subject(open_complete(model, inputs=inputs, length=length, trust_remote_code=trust_remote_code), text)
