"""Which weights produce every head's queries, keys, values and outputs: found by running the model, for any layout.

The inputs of an attention are compared, number by number, with the outputs of the linear layers before it: a view, a
transpose, a split of fused projections or a constant factor leaves each number recognisable. RoPE rotates them, but not
at position 0; the rotation at a far position is then solved for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deadweight.compress.attention_calls import AttentionCall, Watch, observing
from deadweight.compress.streaming import device_of, float_of
from deadweight.errors import DeadweightError
from deadweight.save.slim_layout import is_linear
from deadweight.source.inputs import Inputs
from deadweight.source.model import Source
from deadweight.source.printable import printable
from deadweight.source.trial_run import refusing_failures

FEWEST, MOST = 12, 512  # examples; two numbers count as the same if they agree in all of them
ANGLE = 1e-3  # radians at the farthest position: a pair that rotates less counts as non-rotary


@dataclass(frozen=True)
class Rows:
    """The rows of a linear layer that produce the heads: row = places[head, place], times a factor."""

    module: str
    places: Tensor  # (heads, size)
    factor: Tensor  # (heads, size): what attention sees, divided by the row's own output


@dataclass(frozen=True)
class CachedForm:
    """How a model caches keys and values that its own code reads: see `slim/decoded_states.py`."""

    rotated_second: bool = False  # of the two tensors that it caches, the second has rotary positions
    copies: int = 1  # equal heads for every one of them
    reached: bool = False  # whether its attention is called through transformers' interface
    expanded: int = 0  # numbers per token that attention reads, made from what is cached


@dataclass(frozen=True)
class Heads:
    """One attention: the number and size of its heads, and the weights that produce them.

    A side without rows is computed in another way (behind a norm, for example); `output` is the linear layer that reads
    the concatenated outputs. `rotary_pairs` are the pairs of dimensions that RoPE rotates together.
    """

    path: str
    heads: int
    key_heads: int
    d_qk: int
    d_v: int
    query: Rows | None
    key: Rows | None
    value: Rows | None
    output: str | None
    rotary_pairs: tuple[tuple[int, int], ...]
    keys_unclear: str | None = None  # why queries and keys could not be located
    query_maker: Rows | None = None  # the layer, linear or not, whose output is the queries before RoPE
    form: CachedForm | None = None  # with it, the heads are those that are cached, and queries stand for keys

    @property
    def groups(self) -> int:
        return self.heads // self.key_heads

    @property
    def makers(self) -> tuple[str, ...]:
        """The linear layers that produce queries, keys and values."""
        return tuple(dict.fromkeys(side.module for side in (self.query, self.key, self.value) if side is not None))

    @property
    def layers(self) -> tuple[str, ...]:
        """The linear layers before and after the heads."""
        return self.makers if self.output is None else (*self.makers, self.output)

    @property
    def non_rotary(self) -> tuple[int, ...]:
        turned = {place for pair in self.rotary_pairs for place in pair}
        return tuple(i for i in range(self.d_qk) if i not in turned)


@dataclass
class Seen:
    """The inputs and outputs of one attention in one run, on the CPU."""

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    layers: dict[str, Tensor]  # outputs of the layers since the previous attention
    reader: str | None = None


@dataclass
class ForwardRecord:
    """The attentions of one forward pass in order, with the layers around them."""

    seen: dict[str, Seen] = field(default_factory=dict)
    layers: dict[str, Tensor] = field(default_factory=dict)
    last: Seen | None = None
    knows_sinks: bool = False

    def __call__(self, call: AttentionCall) -> Tensor:
        path, query, key, value = call.path, call.query, call.key, call.value
        out = call.attend(query, key, value)
        self.last = Seen(query.cpu(), key.cpu(), value.cpu(), out.cpu(), self.layers)
        self.seen.setdefault(path, self.last)
        self.layers = {}
        return out

    def before(self, name: str, value: Any) -> None:
        if self.last is not None and self.last.reader is None and isinstance(value, Tensor):
            joined = self.last.out.transpose(1, 2).flatten(2)
            if value.numel() == joined.numel() and torch.equal(value.cpu().reshape(joined.shape), joined):
                self.last.reader = name

    def after(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor) and value.ndim >= 2:
            self.layers[name] = value.cpu()


def locate(source: Source, *, sinks: bool = False) -> tuple[Heads, ...]:
    """Every attention of the model, in the order in which they are reached; refuses attention sinks unless told."""
    start = partial(ForwardRecord, knows_sinks=sinks)
    near = record_runs(source, start, far=False)
    if not near[0].seen:
        raise DeadweightError(
            f"{printable(source.name)} has no softmax attention that transformers' attention interface reaches; "
            "expected one: without it there are no heads to measure"
        )
    far = record_runs(source, start, far=True)
    return tuple(heads_of(path, source.module, near, far) for path in near[0].seen)


def record_runs(
    source: Source, start: Callable[[], ForwardRecord], *, far: bool, watch: Watch = observing
) -> list[ForwardRecord]:
    """Run the model on as many random examples as are needed; token-only examples go in one batch."""
    generator = torch.Generator().manual_seed(0)
    record = partial(record_run, source, start, far=far, watch=watch)
    runs = [record(*source.inputs.draw(generator))]
    drawn = [source.inputs.draw(generator) for _ in range(examples_needed(runs[0]) - 1)]
    tensors = [name for name, x in source.inputs.kwargs.items() if isinstance(x, Tensor)]
    if not source.inputs.args and tensors == ["input_ids"]:
        together = torch.cat([kwargs["input_ids"] for _, kwargs in drawn])
        drawn = [((), {**source.inputs.kwargs, "input_ids": together})]
    return runs + [record(*example) for example in drawn]


@torch.no_grad()
def record_run(
    source: Source,
    start: Callable[[], ForwardRecord],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    far: bool,
    watch: Watch,
) -> ForwardRecord:
    run = start()
    args, kwargs = Inputs(args, kwargs).on(device_of(source.module), float_of(source.module))
    kwargs = {**kwargs, **(far_positions(source, kwargs) if far else {})}
    try:
        with refusing_failures(source.name), watch(source.module, run), record_layers(source.module, run):
            source.module(*args, **kwargs)
    except NotImplementedError as error:
        raise DeadweightError(f"{printable(source.name)} has {error}; its heads cannot be measured") from error
    return run


def examples_needed(run: ForwardRecord) -> int:
    """How many examples are needed so that every attention sees twice as many vectors as a head has dimensions."""
    needed = [-(-2 * s.query.shape[-1] // (s.query.shape[0] * s.query.shape[1])) for s in run.seen.values()]
    return min(MOST, max([FEWEST, *needed]))


def far_positions(source: Source, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Positions at the end of the model's context, for models with rotary positions."""
    longest = getattr(source.config, "max_position_embeddings", None)
    ids = kwargs.get("input_ids")
    rotary = any(getattr(source.config, name, None) for name in ("rope_parameters", "rotary_dim"))
    rotary = rotary or getattr(source.config, "positions", None) == "rotary"
    if not rotary or longest is None or ids is None:
        return {}
    last = torch.arange(longest - ids.shape[1], longest, device=ids.device)
    return {"position_ids": last.expand(ids.shape[0], -1)}


@contextmanager
def record_layers(model: nn.Module, run: ForwardRecord) -> Iterator[None]:
    """Record inputs and outputs of every layer without submodules."""
    hooks = []
    for name, module in model.named_modules():
        if any(True for _ in module.children()):
            continue
        hooks.append(module.register_forward_hook(lambda m, a, out, name=name: run.after(name, out)))
        if is_linear(module):
            hooks.append(module.register_forward_pre_hook(lambda m, a, name=name: run.before(name, a[0])))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def heads_of(path: str, model: nn.Module, near: list[ForwardRecord], far: list[ForwardRecord]) -> Heads:
    first = near[0].seen[path]
    heads, key_heads = first.query.shape[1], first.key.shape[1]
    sides = {side: find_rows(side, path, model, near) for side in ("query", "key", "value")}
    rotary_pairs: tuple[tuple[int, int], ...] = ()
    keys_unclear: str | None = None
    query = sides["query"]
    if query is None:
        keys_unclear = "what makes the queries is not a layer whose output can be recognised"
    elif not is_never_rotated(query, "query", path, near):
        rotary_pairs, keys_unclear = find_rotary_pairs(query, path, far)
    rows = {
        side: linear if linear is not None and is_linear(model.get_submodule(linear.module)) else None
        for side, linear in sides.items()
    }
    return Heads(
        path,
        heads,
        key_heads,
        first.query.shape[-1],
        first.value.shape[-1],
        rows["query"],
        rows["key"],
        rows["value"],
        first.reader,
        rotary_pairs,
        keys_unclear,
        query,
    )


def flatten_heads(states: Tensor) -> Tensor:
    """(b, h, t, d) as (b, t, h·d)."""
    return states.transpose(1, 2).flatten(2)


def as_rows(output: Tensor, like: Tensor) -> Tensor | None:
    """A layer's output as (b, t, rows), if it has one row per token of these states."""
    if output.shape == like.shape:
        return flatten_heads(output)
    batch, tokens = like.shape[0], like.shape[2]
    return output.reshape(batch, tokens, -1) if output.numel() % (batch * tokens) == 0 else None


def find_rows(side: str, path: str, model: nn.Module, runs: list[ForwardRecord]) -> Rows | None:
    """The layer before an attention whose rows are its queries, keys or values.

    They are compared at all tokens, or at the first, which RoPE does not rotate.
    """
    states = [getattr(run.seen[path], side) for run in runs]
    heads, size = states[0].shape[1], states[0].shape[-1]
    layers = list(reversed(runs[0].seen[path].layers))
    layers.sort(key=lambda name: not is_linear(model.get_submodule(name)))  # linear ones first
    for tokens in (slice(None), slice(0, 1)):
        target = torch.cat([flatten_heads(s)[:, tokens].flatten(0, 1) for s in states]).double()
        if float(target.std(0).max()) <= 1e-6 * float(target.abs().max()):
            continue  # the same in every example, like an image's first token: every column would match
        for name in layers:
            seen = [as_rows(run.seen[path].layers[name], s) for run, s in zip(runs, states, strict=True)]
            outputs = [o[:, tokens].flatten(0, 1) for o in seen if o is not None]
            if len(outputs) < len(seen) or outputs[0].shape[-1] < heads * size:
                continue
            if (matched := match(target, torch.cat(outputs).double(), float_of(model))) is not None:
                return Rows(name, matched[0].view(heads, size), matched[1].view(heads, size))
    return None


def match(target: Tensor, rows: Tensor, precision: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """For every column of the target the column of rows that it is a positive multiple of, and the factor."""
    tolerance = 20 * torch.finfo(precision).eps
    a, b = target / target.norm(dim=0).clamp(min=1e-300), rows / rows.norm(dim=0).clamp(min=1e-300)
    places = one_to_one((a.T @ b) > 1 - tolerance)
    if places is None:
        return None
    factor = target.norm(dim=0) / rows[:, places].norm(dim=0)
    near_one = (factor - 1).abs() < tolerance
    return places, torch.where(near_one, torch.ones_like(factor), factor)


def one_to_one(alike: Tensor) -> Tensor | None:
    """Match every row with a different column that is like it; rows that are equal take their columns in order."""
    places = alike.int().argmax(1)
    if not bool(alike.any(1).all()):
        return None
    if len(set(places.tolist())) == len(places):
        return places
    taken: set[int] = set()
    columns = []
    for row in alike:
        free = next((c for c in row.nonzero().flatten().tolist() if c not in taken), None)
        if free is None:
            return None
        taken.add(free)
        columns.append(free)
    return torch.tensor(columns)


def before_rotation(rows: Rows, side: str, path: str, run: ForwardRecord) -> tuple[Tensor, Tensor]:
    """Queries or keys before and after RoPE, each (b, t, heads, size)."""
    seen = run.seen[path]
    after = getattr(seen, side)
    output = as_rows(seen.layers[rows.module], after)
    assert output is not None
    before = output[..., rows.places.flatten()].unflatten(-1, rows.places.shape) * rows.factor.to(output)
    return before.double(), after.transpose(1, 2).double()


def is_never_rotated(rows: Rows, side: str, path: str, runs: list[ForwardRecord]) -> bool:
    for run in runs:
        before, after = before_rotation(rows, side, path, run)
        scale = float(after.abs().max()) or 1.0
        if float((before - after).abs().max()) > 1e-3 * scale:
            return False
    return True


def find_rotary_pairs(
    rows: Rows, path: str, runs: list[ForwardRecord]
) -> tuple[tuple[tuple[int, int], ...], str | None]:
    """The pairs of dimensions that a far position rotates together, from the linear map between before and after.

    Two positions are used: one of them may rotate some pair by a multiple of half a turn.
    """
    pairs = [before_rotation(rows, "query", path, run) for run in runs]
    size = rows.places.shape[1]
    partners = torch.zeros(size, size, dtype=torch.bool)
    for position in (-1, -2):
        before = torch.cat([b[:, position].flatten(0, 1) for b, _ in pairs])  # samples × size
        after = torch.cat([a[:, position].flatten(0, 1) for _, a in pairs])
        if before.shape[0] < size + 8:
            return (), "there are too few examples to see how positions turn its heads"
        turn = torch.linalg.lstsq(before, after).solution.T  # after = turn · before
        error = float((before @ turn.T - after).norm() / after.norm().clamp(min=1e-300))
        if error > 1e-2:
            return (), "positions change its heads in a way that is not linear"
        partners |= (turn.abs() > ANGLE) & ~torch.eye(size, dtype=torch.bool)
    if int(partners.sum(1).max()) > 1 or not bool((partners == partners.T).all()):
        return (), "positions turn its heads in a way that is no rotation of rotary_pairs"
    return tuple((i, j) for i, j in partners.nonzero().tolist() if i < j), None
