"""Checking a model that is too large to be in memory twice: a few of its layers at a time.

The proofs speak of a short model, with as few blocks as show every kind. Any consecutive blocks of the large model,
put into it, make a model of their own, before and after the reduction: both must be the same function.

The weights after the reduction are those that are on their way to the file: a window runs on a thread of its own, waits
for each weight until it is final, and is done with it before the next few come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from threading import Condition, Lock, Thread
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from deadweight.graph.bind import bind
from deadweight.graph.evaluate import Lazy, evaluate, real_outputs
from deadweight.graph.node import DROPOUTS, RANDOM, Graph, Node
from deadweight.reduce.apply import Applied, Scaled, Weights, apply
from deadweight.reduce.job import Job
from deadweight.reduce.pipeline import Stopped
from deadweight.reduce.verify import Error, Verification, relative
from deadweight.rewrite.rewrite import Rewrite
from deadweight.source.kinds import Config
from deadweight.threads import limit, one_thread

Read = Callable[[str], Tensor | Lazy]


def open_windows(job: Job, rewrites: Sequence[Rewrite], say: Callable[[str], None]) -> Windows | None:
    """The first and the last blocks, in float64; None where the model has no blocks that stand for each other.

    A window that some rewrite crosses cannot take the weights of the whole plan, which change what lies outside as
    well: it is compared here and now, with the rewrites that lie inside.
    """
    constants = real_constants(job)
    if len(job.source.blocks) != 1 or constants is None:
        return None
    blocks = job.source.blocks[0]
    last = len(blocks.representatives) - blocks.kept
    windows = [Window(job, rewrites, offset, constants) for offset in dict.fromkeys((0, last))]
    for window in windows:
        if not window.can_be_fed:
            say(f"verifying {window.words}")
            window.check_alone()
    return Windows(windows)


class Windows:
    """All windows; a context, at whose end no thread is left running."""

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

    def feed(self, name: str, value: Any) -> None:
        """Give a final weight to the windows that hold it."""
        for window in self.fed:
            if name in window.coming:
                window.feed(name, value)

    def verification(self) -> Verification:
        """Wait for the last window, and say how far any of them is off."""
        worst = [max(column) for column in zip(*(w.result() for w in self.windows), strict=True)]
        layers = " and ".join(w.words.removeprefix("layers ") for w in self.windows)
        errors = tuple(Error(f"output {i}", e) for i, e in enumerate(worst))
        return Verification(errors, f"random inputs, layers {layers} by themselves")


class Window:
    """The short model with these blocks, before and after the reduction."""

    def __init__(self, job: Job, rewrites: Sequence[Rewrite], offset: int, constants: dict[str, Tensor]) -> None:
        blocks = job.source.blocks[0]
        self.job, self.constants = job, constants
        self.words = f"layers {offset} to {offset + blocks.kept - 1}"

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
        self.made: dict[str, Any] = {}
        self.wants: str | None = None  # the weight that the thread cannot go on without
        self.held, self.over = 0, False
        self.thread: Thread | None = None

    def check_alone(self) -> None:
        """Compare with rewrites that are done for this window only."""
        with one_thread():
            self.errors = relative([self.outputs(Reduced(self.job, self.inside).read)], [self.outputs(self.job.read)])

    def start(self, turn: Lock) -> None:
        self.thread = Thread(target=self.run, args=(turn,), name="deadweight-window", daemon=True)
        self.thread.start()

    def run(self, turn: Lock) -> None:
        limit(1)
        try:
            with turn:  # one after the other: each holds a weight
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
        if isinstance(value, Scaled):
            return RowByRow(self.job, name, value.factor)
        return self.original(name) if value is None else value

    def feed(self, name: str, value: Any) -> None:
        """Hand over a final weight; wait while the window holds another in float64, and can go on with it."""
        kept = Scaled(value.factor, value.factor) if isinstance(value, Scaled) else value  # the rest is read again
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
    """A stored weight times a factor; only the rows that are worked on are in memory."""

    def __init__(self, job: Job, name: str, factor: Tensor | None = None) -> None:
        shape = job.checkpoint.shape(job.stored_name(name))
        super().__init__(torch.empty(shape, device="meta"), torch.ones(()) if factor is None else factor)
        object.__setattr__(self, "read", partial(job.read, name))

    def rows(self, rows: slice, into: Tensor) -> Tensor:
        into.copy_(self.read(rows))  # type: ignore[attr-defined]
        if self.factor.ndim == 0:
            return into
        return into.mul_(self.factor[rows] if self.factor.shape[0] == len(self.stored) else self.factor)


def size_of(value: Any) -> int:
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
    """Values by node, each read when it is asked for and not kept."""

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
    """Reduced weights in float64, made in the order of the layers, each given out once."""

    def __init__(self, job: Job, rewrites: Sequence[Rewrite]) -> None:
        self.job = job
        self.made: dict[str, Any] = {}
        self.coming = {name for r in rewrites for name in r.touches}
        scaled = lambda _, stored, factor: Scaled(factor, factor)  # noqa: E731 - the weight itself is read again
        self.stream = apply(dict(enumerate(rewrites)), Weights(job.read, scaled=scaled), Applied())

    def read(self, name: str) -> Tensor | Lazy:
        while name in self.coming:
            ready, value = next(self.stream)
            self.coming.discard(ready)
            if value is not None:
                self.made[ready] = value
        value = self.made.pop(name, None)
        if isinstance(value, Scaled):
            return Lazy(self.job.read(name), value.factor)
        return self.job.read(name) if value is None else value


def real_constants(job: Job) -> dict[str, Tensor] | None:
    """Tensors that no file stores (rotary frequencies, say), made anew where the model is on shapes alone."""
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
    """A buffer's value, from a new instance of the module that holds it, if a config is all that it needs."""
    for owner in module.modules():
        for name, own in owner.named_buffers(recurse=False):
            if own is buffer:
                try:
                    with torch.device("cpu"):
                        fresh: Any = type(owner)(config)
                    value = fresh.get_buffer(name)
                except Exception:  # noqa: BLE001 - the model's own code
                    return None
                return value if value.shape == buffer.shape and not value.is_meta else None
    return None
