"""Comparing a model that is too large to be in memory twice, a few of its layers at a time.

The proofs are about a short model with one block of each kind. Put any consecutive blocks of the large model into it,
before and after the reduction: both short models must be the same function.

The weights after the reduction are those that are about to be written: a window runs on a thread of its own, waits for
each weight until it is final, and uses it before the next few arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from threading import Condition, Lock, Thread
from types import TracebackType

import torch
from torch import Tensor, nn

from deadweight.graph.bind import bind
from deadweight.graph.evaluate import Lazy, evaluate, real_outputs
from deadweight.graph.node import DROPOUTS, RANDOM, Graph, Node
from deadweight.progress import Progress
from deadweight.reduce.apply import Applied, FinalWeight, ScaledWeight, Weights, apply
from deadweight.reduce.comparison import relative
from deadweight.reduce.error_limits import Error, Verification
from deadweight.reduce.job import ReductionJob
from deadweight.reduce.ordered_threads import Stopped
from deadweight.rewrite.rewrite import Rewrite
from deadweight.source.type_aliases import Config
from deadweight.threads import limit, one_thread

Read = Callable[[str], Tensor | Lazy]


def open_windows(job: ReductionJob, rewrites: Sequence[Rewrite], progress: Progress) -> Windows | None:
    """Windows on the first and the last blocks, in float64; None where the model has no repeated blocks.

    A rewrite may change weights inside and outside of a window. Such a window cannot be compared with the weights of
    the whole plan; it is compared here, with only the rewrites that lie inside.
    """
    constants = real_constants(job)
    if len(job.source.blocks) != 1 or constants is None:
        return None
    blocks = job.source.blocks[0]
    last = len(blocks.representatives) - blocks.kept
    windows = [Window(job, rewrites, offset, constants) for offset in dict.fromkeys((0, last))]
    for window in windows:
        if not window.can_be_fed:
            progress(f"verifying layers {window.layers}")
            window.check_alone()
    return Windows(windows)


class Windows:
    """All windows, as a context manager: when it is left, no thread is running."""

    def __init__(self, windows: Sequence[Window]) -> None:
        self.windows = windows
        self.fed = [w for w in windows if w.can_be_fed]
        self.wanted = {name for w in self.fed for name in w.coming}

    def __enter__(self) -> Windows:
        turn = Lock()
        for window in self.fed:
            window.start(turn)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        for window in self.fed:
            window.stop()

    def feed(self, name: str, value: FinalWeight | None) -> None:
        """Pass a final weight to the windows that contain it."""
        for window in self.fed:
            if name in window.coming:
                window.feed(name, value)

    def verification(self) -> Verification:
        """Wait for all windows, and return the largest error of each output."""
        worst = [max(column) for column in zip(*(w.result() for w in self.windows), strict=True)]
        layers = " and ".join(w.layers for w in self.windows)
        errors = tuple(Error(f"output {i}", e) for i, e in enumerate(worst))
        return Verification(errors, f"random inputs, layers {layers} on their own")


class Window:
    """The short model with these blocks, before and after the reduction."""

    def __init__(
        self, job: ReductionJob, rewrites: Sequence[Rewrite], offset: int, constants: dict[str, Tensor]
    ) -> None:
        blocks = job.source.blocks[0]
        self.job, self.constants = job, constants
        self.layers = f"{offset} to {offset + blocks.kept - 1}"

        def moved(name: str) -> str:
            index = blocks.index_in(name)
            return name if index is None else blocks.moved(name, index + offset)

        own = (*job.graph.parameters.items(), *job.graph.buffers.items())
        self.names = {node: moved(name) for node, name in own}
        here = set(self.names.values())
        users = {name: [u.op for u in job.graph.users[node]] for node, name in self.names.items()}
        self.linear = {name for name, ops in users.items() if ops and set(ops) == {"linear"}}
        self.inside = [r for r in rewrites if set(r.touches) <= here]
        self.coming = {name for r in self.inside for name in r.touches}
        crossed = any(here.intersection(r.touches) for r in rewrites if not set(r.touches) <= here)
        draws = any(n.op in RANDOM - DROPOUTS for n in job.graph.nodes.values())  # all threads share torch's generator
        self.can_be_fed = not crossed and not draws
        self.graph = weights_when_needed(job.graph)
        self.inputs = bind(self.graph, *job.source.draw(torch.Generator().manual_seed(0)))
        self.errors: list[float] = []
        self.failure: BaseException | None = None
        self.changed = Condition()
        self.made: dict[str, FinalWeight | None] = {}
        self.wants: str | None = None  # the weight that the thread waits for
        self.held, self.over = 0, False
        self.thread: Thread | None = None

    def check_alone(self) -> None:
        """Compare with the rewrites inside this window, applied for it alone."""
        with one_thread():
            self.errors = relative([self.outputs(Reduced(self.job, self.inside).read)], [self.outputs(self.job.read)])

    def start(self, turn: Lock) -> None:
        self.thread = Thread(target=self.run, args=(turn,), name="deadweight-window", daemon=True)
        self.thread.start()

    def run(self, turn: Lock) -> None:
        limit(1)
        try:
            with turn:  # one window after the other: each holds a weight in memory
                before = self.outputs(self.original)
            self.errors = relative([self.outputs(self.reduced)], [before])
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            self.failure = error
        with self.changed:
            self.over = True
            self.made.clear()
            self.changed.notify_all()

    @torch.no_grad()
    def outputs(self, read: Read) -> list[Tensor]:
        weights = OnDemand(self.graph, self.names, read, self.constants)
        return list(real_outputs(evaluate(self.graph, weights, self.inputs)))

    def original(self, name: str) -> Tensor | Lazy:
        if self.over:
            raise Stopped
        return self.job.read(name) if name not in self.linear else RowByRow(self.job, name)

    def reduced(self, name: str) -> Tensor | Lazy:
        """A weight after the reduction, as soon as it is final."""
        if name not in self.coming:
            return self.original(name)
        with self.changed:
            self.wants = name
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.over or name in self.made)
            self.wants = None
            if self.over:
                raise Stopped
            value = self.made.pop(name)
            self.held -= size_of(value)
            self.changed.notify_all()
        if isinstance(value, ScaledWeight):
            return RowByRow(self.job, name, value.factor)
        return self.original(name) if value is None else value

    def feed(self, name: str, value: FinalWeight | None) -> None:
        """Pass a final weight to the window; wait while it holds another one in float64 that it can use first."""
        kept = value
        if isinstance(value, ScaledWeight):
            kept = ScaledWeight(value.factor, value.factor)  # the weight itself is read again
        with self.changed:
            self.changed.wait_for(lambda: self.over or self.is_stuck() or not self.held)
            if not self.over:
                self.made[name] = kept
                self.held += size_of(kept)
            self.changed.notify_all()

    def is_stuck(self) -> bool:
        return self.wants is not None and self.wants not in self.made

    def result(self) -> list[float]:
        if self.thread is not None:
            self.thread.join()
        if self.failure is not None:
            raise self.failure
        return self.errors

    def stop(self) -> None:
        with self.changed:
            self.over = True
            self.changed.notify_all()
        if self.thread is not None:
            self.thread.join()


class RowByRow(Lazy):
    """A stored weight times a factor; only the rows in use are in memory."""

    def __init__(self, job: ReductionJob, name: str, factor: Tensor | None = None) -> None:
        shape = job.checkpoint.shape(job.stored_name(name))
        super().__init__(torch.empty(shape, device="meta"), torch.ones(()) if factor is None else factor)
        object.__setattr__(self, "read", partial(job.read, name))

    def rows(self, rows: slice, into: Tensor) -> Tensor:
        into.copy_(self.read(rows))  # type: ignore[attr-defined]
        if self.factor.ndim == 0:
            return into
        return into.mul_(self.factor[rows] if self.factor.shape[0] == len(self.stored) else self.factor)


def size_of(value: FinalWeight | None) -> int:
    return value.numel() * value.dtype.itemsize if isinstance(value, Tensor) else 0


def weights_when_needed(graph: Graph) -> Graph:
    """The same graph with each weight right before the first node that reads it."""
    nodes: dict[str, Node] = {}
    for node in graph.nodes.values():
        if node.op not in ("parameter", "buffer"):
            nodes.update({name: graph.nodes[name] for name in node.inputs if name not in nodes})
            nodes[node.name] = node
    return replace(graph, nodes={**nodes, **{n: v for n, v in graph.nodes.items() if n in graph.outputs}})


class OnDemand(Mapping[str, Tensor | Lazy]):
    """Values by node, each read when it is used, and not kept."""

    def __init__(
        self, graph: Graph, names: dict[str, str], read: Callable[[str], Tensor | Lazy], constants: dict[str, Tensor]
    ) -> None:
        self.graph, self.names, self.read, self.constants = graph, names, read, constants

    def __getitem__(self, node: str) -> Tensor | Lazy:
        return self.read(self.names[node]) if node in self.names else self.constants[node]

    def __iter__(self) -> Iterator[str]:
        return iter(self.graph.tensors)

    def __len__(self) -> int:
        return len(self.graph.tensors)


class Reduced:
    """Reduced weights in float64, computed in the order of the layers, each returned once."""

    def __init__(self, job: ReductionJob, rewrites: Sequence[Rewrite]) -> None:
        self.job = job
        self.made: dict[str, FinalWeight | None] = {}
        self.coming = {name for r in rewrites for name in r.touches}
        only_factor = lambda _, stored, factor: ScaledWeight(factor, factor)  # noqa: E731 - the weight is read again
        self.stream = apply(dict(enumerate(rewrites)), Weights(job.read, scale_final=only_factor), Applied())

    def read(self, name: str) -> Tensor | Lazy:
        while name in self.coming:
            ready, value = next(self.stream)
            self.coming.discard(ready)
            if value is not None:
                self.made[ready] = value
        value = self.made.pop(name, None)
        if isinstance(value, ScaledWeight):
            return Lazy(self.job.read(name), value.factor)
        return self.job.read(name) if value is None else value


def real_constants(job: ReductionJob) -> dict[str, Tensor] | None:
    """Tensors that no file stores (rotary frequencies, for example), recomputed if the model has no values for them."""
    result: dict[str, Tensor] = {}
    for node, tensor in job.graph.tensors.items():
        if node in job.graph.parameters or node in job.graph.buffers:
            continue
        if tensor.is_meta:
            made = remade(job.source.module, tensor, job.source.config)
            if made is None:
                return None
            tensor = made
        result[node] = tensor
    return result


def remade(module: nn.Module, buffer: Tensor, config: Config) -> Tensor | None:
    """A buffer's value, from a new instance of its module, if the constructor takes only the config."""
    for owner in module.modules():
        for name, own in owner.named_buffers(recurse=False):
            if own is buffer:
                try:
                    with torch.device("cpu"):
                        fresh = type(owner)(config)
                    value = fresh.get_buffer(name)
                except Exception:  # noqa: BLE001 - the model's own code
                    return None
                return value if value.shape == buffer.shape and not value.is_meta else None
    return None
