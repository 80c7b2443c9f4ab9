"""Encoding one token on a CPU: what `Coder.encode` does, in fewer operations, because each costs more than its work."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .coder import TABLE, Coder, precise
from .codes import EXPONENTS, UNIT, Quantiser, scale_of
from .cpu_maps import beside, once, rotations


@dataclass(frozen=True)
class Stage:
    """One stage of all sets: coordinates of vectors, (sets, inputs, slots), and how they are rounded."""

    encode: Tensor
    reach: Tensor  # (sets, slots): one over the largest coordinate that is not clipped
    half: Tensor  # of the levels
    most: Tensor  # the last code
    place: Tensor  # two to the first bit of a code


@dataclass(frozen=True)
class Encoding:
    """What encoding one token reads of a coder."""

    stages: tuple[Stage, ...]
    predict: Tensor  # (sets, slots, values)
    order: Tensor  # of the dimensions of a key: rotary pairs, each side by side, then the others
    key_mean: Tensor  # (sets, keys), in that order
    value_mean: Tensor  # (sets, values)
    limits: Tensor  # the largest coordinate for every exponent but the last, in parts of its reach
    scales: Tensor  # by exponent
    rates: tuple[float, ...]  # negative: keys are turned back


def encoding_of(coder: Coder, dtype: torch.dtype) -> Encoding:
    return once(coder, "_cpu_encoding", dtype, make_encoding)


@torch.no_grad()
@torch.inference_mode(False)
def make_encoding(coder: Coder, dtype: torch.dtype) -> Encoding:
    spec, sets = coder.spec, coder.spec.n_sets
    inside = beside(spec.pairs, spec.d_qk)
    keys = (torch.arange(spec.key_heads // sets)[:, None] * spec.d_qk + inside).flatten()
    inputs = torch.cat([keys, torch.arange(spec.set_keys, spec.inputs)])
    fields = [slice(0, spec.key_fields), slice(spec.key_fields, None)][: 2 if spec.value_fields else 1]
    encodes = [coder.key_encode[:, :, inputs], coder.value_encode]
    stages = tuple(stage_of(coder, encode, own, dtype) for encode, own in zip(encodes, fields, strict=False))
    scales = scale_of(torch.arange(EXPONENTS), dtype)
    return Encoding(
        stages,
        coder.predict.to(dtype, copy=True),
        (coder.order if spec.pairs else torch.arange(spec.d_qk))[inside],
        coder.key_mean.view(sets, -1)[:, keys].to(dtype),
        coder.value_mean.view(sets, -1).to(dtype, copy=True),
        scales[:-1].float(),
        scales,
        tuple((-coder.rates.view(torch.float32)).tolist()) if spec.pairs else (),
    )


def stage_of(coder: Coder, encode: Tensor, fields: slice, dtype: torch.dtype) -> Stage:
    units = coder.layout.units
    rounding = Quantiser.of(units.widths[:, fields], torch.empty(0, dtype=dtype))
    levels, reach = rounding.levels.squeeze(1), rounding.reach.squeeze(1)
    places = torch.exp2(units.offsets[:, fields].flatten(1).to(dtype))
    return Stage(encode.mT.to(dtype).contiguous(), 1 / reach, levels / 2, levels - 1, places)


def encode_on_cpu(coder: Coder, key: Tensor, value: Tensor, positions: list[int]) -> tuple[Tensor, Tensor]:
    """The rows and exponents of one new token of every sequence, (b, g, 1, d), at its position."""
    dtype = precise(key.dtype)
    maps, sets = encoding_of(coder, dtype), coder.spec.n_sets
    keys = turned_back(maps, key.to(dtype).squeeze(2).index_select(2, maps.order), positions)
    keys = keys.reshape(len(key), sets, -1) - maps.key_mean  # b sets keys
    values = value.to(dtype).reshape(len(key), sets, -1) - maps.value_mean
    first = maps.stages[0]
    codes, exponent = rounded(maps, first, torch.cat([keys, values], 2) if coder.spec.joint else keys)
    units = placed(codes, first, coder.spec.n_units)
    if len(maps.stages) > 1:
        z = (codes - first.most / 2) * maps.scales.take(exponent)
        more, higher = rounded(maps, maps.stages[1], values - by_set(z, maps.predict))
        units, exponent = units + placed(more, maps.stages[1], coder.spec.n_units), exponent + (higher << 4)
    signed = torch.where(units >= 1 << (UNIT - 1), units - (1 << UNIT), units).to(torch.int16)
    return signed.view(torch.uint8).unsqueeze(2), exponent.to(torch.uint8).unsqueeze(2)


def turned_back(maps: Encoding, keys: Tensor, positions: list[int]) -> Tensor:
    """Keys (b, g, d) before RoPE."""
    pairs = len(maps.rates)
    if not pairs:
        return keys
    at = [max(0, position) for position in positions]  # before the start there is padding, which no query sees
    table = rotations(maps.rates, (max(at) // TABLE + 1) * TABLE, keys.dtype)
    turns = table[at[0]] if len(set(at)) == 1 else table[at].unsqueeze(1)
    turning = torch.view_as_complex(keys[..., : 2 * pairs].unflatten(2, (pairs, 2)).contiguous())
    turned = torch.view_as_real(turning * turns).flatten(2)
    return turned if 2 * pairs == keys.shape[2] else torch.cat([turned, keys[..., 2 * pairs :]], 2)


def by_set(vectors: Tensor, maps: Tensor) -> Tensor:
    """(b, sets, n) times the map of every set, (sets, n, m)."""
    if len(maps) == 1:
        return (vectors.squeeze(1) @ maps[0]).unsqueeze(1)
    return torch.bmm(vectors.transpose(0, 1), maps).transpose(0, 1)


def rounded(maps: Encoding, stage: Stage, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, as floating-point numbers, and exponents, (b, sets, 1)."""
    coordinates = by_set(vectors, stage.encode)
    largest = (coordinates.abs() * stage.reach).amax(2, keepdim=True).float()
    exponent = torch.bucketize(largest, maps.limits)  # NaN: the last
    scaled = coordinates.div_(maps.scales.take(exponent)).add_(stage.half).floor_()
    return torch.minimum(scaled.clamp_(min=0), stage.most), exponent


def placed(codes: Tensor, stage: Stage, n_units: int) -> Tensor:
    """Codes at their bits in units, (b, sets, units): sums of less than 2^16, which are exact."""
    return (codes * stage.place).unflatten(2, (-1, n_units)).sum(2).to(torch.int32)
