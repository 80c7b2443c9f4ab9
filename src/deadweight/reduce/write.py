"""Writing a reduced checkpoint: stock or slim, one module at a time, complete or absent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from deadweight.progress import Progress
from deadweight.reduce.deadweight_json import manifest, model_card
from deadweight.reduce.error_limits import require_same
from deadweight.reduce.job import ReductionJob, summarise_applied
from deadweight.reduce.result import Reduction
from deadweight.reduce.stored_tensors import Stream
from deadweight.save.atomic_folder import complete_or_absent
from deadweight.save.how_to_load import how_to_load
from deadweight.save.model_card import write_card
from deadweight.save.safetensors_writer import PER_TENSOR, Writer
from deadweight.save.side_files import write_side_files
from deadweight.slim.format import SIGN, SlimSpec


@dataclass(frozen=True)
class Destination:
    """Where the result is written: a folder, or None; and whether an existing folder may be replaced."""

    folder: Path | None
    overwrite: bool


def write(stream: Stream, planned: Reduction, destination: Destination, progress: Progress) -> Reduction:
    """Write the stream's tensors while its windows compare them; OUT appears only if the comparison succeeds."""
    job, out = stream.job, destination.folder
    assert out is not None
    numbers = Numbers(job)
    room = sum(len(n) + 2 * PER_TENSOR for n in job.checkpoint.names) * 2 + 4096
    with complete_or_absent(out, overwrite=destination.overwrite) as draft, Writer(draft, room) as writer:
        with closing(stream.tensors(progress)) as tensors:
            for name, tensor in tensors:
                numbers.count(name, tensor)
                writer.add(job.checkpoint.outer(name), tensor)
        slim = SlimSpec({path: layer.spec for path, layer in stream.layers.items()})
        for name, tensor in guard(job, slim):
            writer.add(job.checkpoint.outer(name), tensor)
        if stream.windows is not None:
            planned = replace(planned, verification=require_same(stream.windows.verification()))
        writer.close()
        done = summarise_applied(job, planned, stream.applied)
        done = replace(done, parameters_after=numbers.total, bytes_after=writer.bytes)
        accompany(job, draft, slim)
        loading = loading_words(job, out)
        (draft / "deadweight.json").write_text(json.dumps(manifest(done), indent=1) + "\n", encoding="utf-8")
        write_card(draft, model_card(done), job.folder, loading, slim=job.layout == "slim")
    return done


class Numbers:
    """How many parameters the file holds: floating-point numbers that are not buffers of the original."""

    def __init__(self, job: ReductionJob) -> None:
        self.buffers = {n for n in job.checkpoint.names if n not in job.source.shapes}
        self.buffers -= {n for first, others in job.graph.tied.items() for n in (first, *others)}
        self.total = 0

    def count(self, name: str, tensor: Tensor) -> None:
        if tensor.is_floating_point() and name not in self.buffers:
            self.total += tensor.numel()


def guard(job: ReductionJob, slim: SlimSpec) -> Iterator[tuple[str, Tensor]]:
    """Empty tensors that make plain transformers fail, and say why.

    Plain transformers initialises missing weights at random, with only a warning. This weight is there and has the
    wrong shape, so loading fails. A second tensor's name, which the error lists, says how to load the checkpoint.
    """
    if job.source.config is not None:
        for path in slim.layers_in_other_form[:1]:
            name = f"{path}.weight"
            dtype = job.checkpoint.dtype(job.stored_name(name))
            yield from ((empty, torch.empty(0, dtype=dtype)) for empty in (name, SIGN))


def accompany(job: ReductionJob, draft: Path, slim: SlimSpec) -> None:
    """Write the other files of the checkpoint."""
    write_side_files(draft, job.folder, job.source.config, type(job.whole), slim if job.layout == "slim" else None)


def loading_words(job: ReductionJob, out: Path) -> str:
    return how_to_load(out.name, type(job.whole), job.source.config, slim=job.layout == "slim")
