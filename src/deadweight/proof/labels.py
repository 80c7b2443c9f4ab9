"""Labels: 64-bit fingerprints of unknown amounts. Equal labels mean equal amounts; label 0 means exactly zero.

Amounts add, so labels add (modulo 2⁶⁴); every other dependence is hashed. Two different amounts share a label with
probability about 2⁻⁶⁴ a pair, and the checker replays each proof with other numbers.
"""

from __future__ import annotations

from hashlib import blake2b

import torch
from jaxtyping import Int64
from torch import Tensor

Labels = Int64[Tensor, "..."]

_A = -7046029254386353131  # odd 64-bit constants of splitmix64, as signed integers
_B = -4658895280553007687
_C = -7723592293110705685
CACHED = 1 << 15  # labels that are hashed at a time: in the processor's cache, memory being slower than arithmetic


def scramble(x: Labels) -> Labels:
    """A bijection of 64-bit integers that leaves no linear structure."""
    return scramble_in_place(x.clone(memory_format=torch.contiguous_format))


def scramble_in_place(x: Labels) -> Labels:
    """The same, in a contiguous tensor that nothing else uses."""
    for part in x.view(-1).split(CACHED):
        part.add_(_A)
        part.bitwise_xor_(shift_right(part, 30)).mul_(_B)
        part.bitwise_xor_(shift_right(part, 27)).mul_(_C)
        part.bitwise_xor_(shift_right(part, 31))
    return x


def shift_right(x: Labels, n: int) -> Labels:
    """Logical, not arithmetic."""
    return (x >> n).bitwise_and_((1 << (64 - n)) - 1)


def key(*parts: object) -> int:
    """A stable 64-bit number for names and constants: different parts have different ones, but for 2⁻⁶⁴ a pair."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little", signed=True)


def compact(x: Tensor) -> Tensor:
    """The same values with every repeated axis (stride 0) shortened to one: work on what is really there."""
    for axis in range(x.ndim):
        if x.stride(axis) == 0 and x.shape[axis] > 1:
            x = x.narrow(axis, 0, 1)
    return x


def plus(shape: tuple[int, ...], *labels: Labels) -> Labels:
    """The sum, broadcast to a shape; what is repeated stays repeated."""
    total: Labels | None = None
    for label in labels:
        total = compact(label) if total is None else total + compact(label)
    return torch.zeros((), dtype=torch.int64).expand(shape) if total is None else total.expand(shape)


def mix(label: Labels, *others: Labels | int) -> Labels:
    """The label of an amount that depends on `label` and `others`; 0 stays 0, for an amount times anything."""
    tensors = [torch.as_tensor(other, dtype=torch.int64) for other in others]
    shape = torch.broadcast_shapes(label.shape, *(t.shape for t in tensors))
    start = compact(label)
    out = start
    for other in tensors:
        out = scramble_in_place((out ^ scramble(compact(other) + _B)).contiguous())
    return (out.masked_fill_(start == 0, 0) if tensors else out).expand(shape)


def fold(labels: Labels, axis: int) -> Labels:
    """One label for all the labels along an axis, in order; 0 if all of them are 0."""
    axis = axis % labels.ndim
    shape = (*labels.shape[:axis], *labels.shape[axis + 1 :])
    count, labels = labels.shape[axis], compact(labels)
    size = labels.shape[axis]
    if size != count:  # one label repeated: its count is part of what it folds to
        return mix(labels.squeeze(axis), key("repeated", count)).expand(shape)
    place = torch.arange(1, size + 1).reshape([-1 if a == axis else 1 for a in range(labels.ndim)])
    return mix(labels, place).sum(axis).expand(shape)


def fresh(shape: tuple[int, ...], *name: object) -> Labels:
    """A different label for every element."""
    count = 1
    for n in shape:
        count *= n
    return scramble(torch.arange(count, dtype=torch.int64).reshape(shape) ^ key(*name))


def constant_along(labels: Labels, axes: tuple[int, ...]) -> bool:
    """Whether all labels agree along these axes."""
    for axis in axes:
        if labels.stride(axis) == 0 or labels.shape[axis] == 1:
            continue
        short = compact(labels)
        if not torch.equal(short, short.narrow(axis, 0, 1).expand_as(short)):
            return False
    return True


def varying_along(labels: Labels, axis: int) -> Tensor:
    """True at the elements of every line along the axis whose labels do not all agree."""
    first = labels.narrow(axis, 0, 1)
    return (labels != first).any(axis, keepdim=True).expand_as(labels)
