"""What decoding on a CPU reads of a coder, made once: `cpu_decode.py` says why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

from .coder import Coder
from .codes import scale_of

T = TypeVar("T")


@dataclass(frozen=True)
class Segment:
    """Codes of one field of neighbouring units, all with bits: where they are read, and where they are written."""

    upper: bool  # in the upper halves of the units
    units: slice
    slots: slice
    mask: Tensor


@dataclass(frozen=True)
class SetMaps:
    """One set of heads. Slots are those with bits only."""

    stages: tuple[tuple[Segment, ...], ...]  # of the codes of keys, and of values if they have codes
    sizes: tuple[int, ...]  # slots of every stage
    to_keys: Tensor  # (keys, slots): rotary pairs of all heads, each side by side, then what is not rotary
    start: Tensor  # (keys,): the constant of that map
    to_values: Tensor  # (heads, slots of all stages and their constants and the mean, d_v)


@dataclass(frozen=True)
class CpuMaps:
    """Of one coder, in one precision."""

    sets: tuple[SetMaps, ...]
    order: Tensor  # of the dimensions of a query: rotary pairs, each side by side, then the others
    mean: Tensor  # (heads, pairs): the mean of the keys that a query meets, as conjugate complex numbers
    rest_mean: Tensor  # (heads, dimensions in no pair)
    scales: tuple[Tensor, ...]  # of a token, by its byte of exponents, for every stage
    rates: tuple[float, ...]


def cpu_maps(coder: Coder, dtype: torch.dtype) -> CpuMaps:
    return once(coder, "_cpu_maps", dtype, make_maps)


def once(coder: Coder, name: str, dtype: torch.dtype, make: Callable[[Coder, torch.dtype], T]) -> T:
    """What follows from a coder, kept under a name: made once, and again when a map has changed."""
    buffers = [b for b in coder._buffers.values() if b is not None]
    state = (dtype, *[(b.data_ptr(), -1 if b.is_inference() else b._version) for b in buffers])
    known = coder.__dict__.get(name)
    if known is None or known[0] != state:
        known = coder.__dict__[name] = (state, make(coder, dtype))
    made: T = known[1]
    return made


@torch.no_grad()
@torch.inference_mode(False)
def make_maps(coder: Coder, dtype: torch.dtype) -> CpuMaps:
    spec, pairs = coder.spec, coder.spec.pairs
    inside = beside(pairs, spec.d_qk)
    order = (coder.order if pairs else torch.arange(spec.d_qk))[inside]
    means = coder.key_mean.double().view(spec.key_heads, spec.d_qk).repeat_interleave(spec.heads // spec.key_heads, 0)
    mean, rest = torch.complex(means[:, :pairs], -means[:, pairs : 2 * pairs]), means[:, 2 * pairs :]
    exponents = torch.arange(256)
    both = (scale_of(exponents & 15, dtype), scale_of(exponents >> 4, dtype))
    rates = tuple(coder.rates.view(torch.float32).tolist()) if pairs else ()
    sets = tuple(set_maps(coder, i, dtype) for i in range(spec.n_sets))
    stages = 2 if spec.value_fields else 1
    return CpuMaps(sets, order, mean.to(dtype.to_complex()), rest.to(dtype), both[:stages], rates)


def beside(pairs: int, size: int) -> Tensor:
    """The order in which the dimensions of a pair are neighbours, given first ones, second ones, and the others."""
    both = torch.arange(2 * pairs).view(2, pairs).T.flatten()
    return torch.cat([both, torch.arange(2 * pairs, size)])


def set_maps(coder: Coder, index: int, dtype: torch.dtype) -> SetMaps:
    spec = coder.spec
    heads = spec.key_heads // spec.n_sets
    fields = [range(spec.key_fields), range(spec.key_fields, spec.key_fields + spec.value_fields)]
    stages = [tuple(segments_of(coder, index, own)) for own in fields if len(own)]
    at = [torch.cat([torch.arange(0), *(slots_of(coder, s, f) for f, s in own)]) for own in stages]
    decodes = [coder.predict, coder.value_decode][: len(stages)]
    rows, ends = [], []
    for decode, own in zip(decodes, at, strict=True):
        folded, constant = coder.map_of(decode, torch.float64)
        rows.append(folded[index][own])
        ends.append(constant[index])
    values = torch.cat([*rows, *ends, coder.value_mean.double().view(spec.n_sets, 1, -1)[index]])
    folded, constant = coder.map_of(coder.key_decode, torch.float64)
    columns = key_columns(spec.pairs, spec.d_qk, heads)
    to_keys, start = (pad_even(x[:, columns]) for x in (folded[index][at[0]], constant[index]))
    return SetMaps(
        tuple(tuple(s for _, s in own) for own in stages),
        tuple(map(len, at)),
        to_keys.T.to(dtype).contiguous(),
        start[0].to(dtype),
        values.unflatten(1, (heads, -1)).transpose(0, 1).to(dtype).contiguous(),
    )


def segments_of(coder: Coder, index: int, fields: range) -> Iterator[tuple[int, Segment]]:
    """The segments of some fields, each with its field; their slots follow one another."""
    units, filled = coder.layout.units, 0
    for field in fields:
        masks = units.masks[index, field].to(torch.int16)
        for first, last in runs(units.widths[index, field] > 0):
            slots = slice(filled, filled + last - first)
            yield field, Segment(not units.low[field], slice(first, last), slots, masks[first:last].contiguous())
            filled = slots.stop


def slots_of(coder: Coder, segment: Segment, field: int) -> Tensor:
    """The slots of a segment among all slots of its stage."""
    first = 0 if field < coder.spec.key_fields else coder.spec.key_fields
    return (field - first) * coder.spec.n_units + torch.arange(segment.units.start, segment.units.stop)


def runs(chosen: Tensor) -> list[tuple[int, int]]:
    """First and last, exclusive, of all neighbours that are chosen."""
    edges = torch.nn.functional.pad(chosen.int(), (1, 1)).diff().nonzero().flatten().tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def key_columns(pairs: int, size: int, heads: int) -> Tensor:
    """The order of the keys of a set: rotary pairs of all heads, then what is not rotary."""
    every = torch.arange(heads)[:, None] * size + beside(pairs, size)
    return torch.cat([every[:, : 2 * pairs].flatten(), every[:, 2 * pairs :].flatten()])


def pad_even(columns: Tensor) -> Tensor:
    """One more column of zeros if there is an odd number: rows of complex numbers start at even places."""
    return torch.nn.functional.pad(columns, (0, columns.shape[1] % 2))


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def rotations(rates: tuple[float, ...], rows: int, dtype: torch.dtype) -> Tensor:
    """e^(i · rate · position) at positions 0, 1, …, (rows, pairs), computed in float64."""
    angle = torch.arange(rows).double()[:, None] * torch.tensor(rates).double()
    return torch.polar(torch.ones_like(angle), angle).to(dtype.to_complex())
