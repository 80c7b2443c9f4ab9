"""Writing a reduced checkpoint: stock or slim, one module at a time, complete or absent."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from deadweight.reduce.apply import Applied, Group
from deadweight.reduce.job import Job, settled
from deadweight.reduce.manifest import card, manifest
from deadweight.reduce.parts import Made, stream
from deadweight.reduce.result import Reduction
from deadweight.reduce.verify import accepted
from deadweight.reduce.windows import Windows
from deadweight.save.beside import how_to_load, lay_beside
from deadweight.save.folder import complete_or_absent
from deadweight.save.layout import Layer
from deadweight.save.stream import PER_TENSOR, Writer
from deadweight.slim.format import SlimSpec


def write(
    job: Job,
    rewrites: Group,
    found: Reduction,
    out: Path,
    made: Made | None,
    windows: Windows | None,
    *,
    overwrite: bool,
    say: Callable[[str], None],
) -> Reduction:
    """Write what the rewrites make of the checkpoint, and have the windows see it pass; OUT appears if they agree."""
    applied, layers, numbers = Applied(), dict[str, Layer](), Numbers(job)
    room = sum(len(n) + 2 * PER_TENSOR for n in job.checkpoint.names) * 2 + 4096
    with complete_or_absent(out, overwrite=overwrite) as draft, Writer(draft, room) as writer:
        with closing(stream(job, rewrites, applied, layers, say, made, windows)) as tensors:
            for name, tensor in tensors:
                numbers.count(name, tensor)
                writer.add(job.checkpoint.outer(name), tensor)
        slim = SlimSpec({path: layer.spec for path, layer in layers.items()})
        for name, tensor in guard(job, slim):
            writer.add(job.checkpoint.outer(name), tensor)
        if windows is not None:
            found = replace(found, verification=accepted(windows.verification()))
        writer.close()
        done = settled(job, found, applied)
        done = replace(done, parameters_after=numbers.total, bytes_after=writer.bytes)
        accompany(job, draft, slim)
        loading = loading_words(job, out)
        (draft / "deadweight.json").write_text(json.dumps(manifest(done), indent=1) + "\n", encoding="utf-8")
        (draft / "README.md").write_text(card(done, loading), encoding="utf-8")
    return done


class Numbers:
    """How many parameters the file holds: floating-point numbers that are not buffers of the original."""

    def __init__(self, job: Job) -> None:
        self.buffers = {n for n in job.checkpoint.names if n not in job.source.shapes}
        self.buffers -= {n for first, others in job.graph.tied.items() for n in (first, *others)}
        self.total = 0

    def count(self, name: str, tensor: Tensor) -> None:
        if tensor.is_floating_point() and name not in self.buffers:
            self.total += tensor.numel()


def guard(job: Job, slim: SlimSpec) -> Iterator[tuple[str, Tensor]]:
    """An empty tensor under the name of one weight that is stored in another form.

    Plain transformers makes up the weights that it does not find, and says so in a warning only; this one it finds, and
    refuses for its shape.
    """
    if job.source.config is not None:
        for path in slim.stored_otherwise[:1]:
            name = f"{path}.weight"
            yield name, torch.empty(0, dtype=job.checkpoint.dtype(job.stored_name(name)))


def accompany(job: Job, draft: Path, slim: SlimSpec) -> None:
    """What lies beside the weights, for a reduction."""
    lay_beside(draft, job.folder, job.source.config, type(job.whole), slim if job.layout == "slim" else None)


def loading_words(job: Job, out: Path) -> str:
    return how_to_load(out.name, type(job.whole), job.source.config, slim=job.layout == "slim")
