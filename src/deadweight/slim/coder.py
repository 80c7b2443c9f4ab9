"""From keys and values to rows of bytes, and back.

The cache of an attention is coded in two stages. The first, *shared*, transforms the keys of a set of heads, before
rotary positions, to coordinates and rounds each to as many bits as its width says. Keys are read from these codes.
Values are predicted from them, because keys and values are made of the same hidden state; the second stage codes what
the prediction misses. If keys and values are coded jointly, the first stage transforms both as one vector.

    keys   = mean + decode · z
    values = mean + predict · z + decode · r        z: shared codes, r: codes of the values stage

Everything is laid out as (batch, numbers, tokens). The dimensions of keys are in the order of `Coder.paired`: the first
dimension of every rotary pair, then the second ones, then those in no pair.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor, nn

from .codes import constants, row
from .format import CacheSpec, CodeSpec
from .scratch import SCRATCH

T = TypeVar("T")
TABLE = 1024  # positions by which the table of angles grows
OCTAVE = 8  # steps of the scale of a token: it is 2^(n / 8)


@dataclass(frozen=True)
class Codes:
    """Coordinates as they are read from rows: (b, kept, t) of every set, and the scale of every token, (b, 1, t)."""

    sets: list[Tensor]
    scale: Tensor

    def scaled(self) -> list[Tensor]:
        return [z * self.scale for z in self.sets]


class Stage(nn.Module):
    """One stage: `encode` makes coordinates of the numbers of a set, `decode` makes numbers of coordinates."""

    def __init__(self, spec: CodeSpec, outputs: int, name: str) -> None:
        super().__init__()
        self.spec, self.name = spec, name
        self.row = [row(run) for run in spec.runs]
        self.kept = tuple(sum(run) for run in spec.runs)
        for i, kept in enumerate(self.kept):
            self.register_buffer(f"encode_{i}", torch.empty(kept, spec.inputs))
            self.register_buffer(f"decode_{i}", torch.empty(outputs, kept))

    def encode(self, index: int) -> Tensor:
        return self.get_buffer(f"encode_{index}")

    def decode(self, index: int) -> Tensor:
        return self.get_buffer(f"decode_{index}")

    @property
    def is_empty(self) -> bool:
        return not any(self.kept)

    def coordinates(self, sets: list[Tensor]) -> list[Tensor]:
        """Of the numbers of every set, (b, inputs, t), the coordinates (b, kept, t)."""
        return [self.encode(i).to(x.dtype) @ x for i, x in enumerate(sets)]

    def exponent(self, coordinates: list[Tensor]) -> Tensor:
        """By how many steps the scale of a token must grow for nothing to be clipped, (b, 1, t) as integers from 0."""
        first = coordinates[0]
        largest = torch.ones(first.shape[0], 1, first.shape[2], device=first.device)
        for z, run in zip(coordinates, self.spec.runs, strict=True):
            if z.shape[1]:
                reach = constants(run, torch.float32, z.device).reach
                largest = torch.maximum(largest, (z.float().abs() / reach).amax(1, keepdim=True))
        largest = torch.nan_to_num(largest, nan=math.inf)
        return (torch.log2(largest) * OCTAVE).ceil().clamp(max=255).to(torch.uint8)

    def rounded(self, coordinates: list[Tensor]) -> list[Tensor]:
        """The coordinates as they would come back from the cache; gradients pass as if nothing had been rounded."""
        scale = scale_of(self.exponent(coordinates))
        pairs = zip(coordinates, self.row, strict=True)
        values = [row_of.values(row_of.encode(z.float() / scale), torch.float32) * scale for z, row_of in pairs]
        return [z + (value.to(z.dtype) - z).detach() for z, value in zip(coordinates, values, strict=True)]

    def rows(self, coordinates: list[Tensor]) -> tuple[Tensor, Codes]:
        """Coordinates as bytes, (b, 1, t, row_bytes), and as they will be read."""
        exponent = self.exponent(coordinates)
        scale = scale_of(exponent)
        codes = [row_of.encode(z.float() / scale) for z, row_of in zip(coordinates, self.row, strict=True)]
        packed = [row_of.pack(c) for c, row_of in zip(codes, self.row, strict=True)]
        levels = [row_of.values(c, torch.float32) for c, row_of in zip(codes, self.row, strict=True)]
        return torch.cat([exponent.transpose(1, 2), *packed], -1).unsqueeze(1), Codes(levels, scale)

    def read(self, rows: Tensor, dtype: torch.dtype) -> Codes:
        """The coordinates that rows of bytes hold, (b, 1, t, row_bytes)."""
        rows = rows.squeeze(1)
        if self.is_empty:
            nothing = rows.new_zeros(len(rows), 0, rows.shape[1], dtype=dtype)
            return Codes([nothing] * len(self.row), rows.new_ones(len(rows), 1, rows.shape[1], dtype=dtype))
        parts = rows[..., 1:].split([row_of.size for row_of in self.row], -1)
        sets = []
        for i, (part, row_of) in enumerate(zip(parts, self.row, strict=True)):
            shape = (len(rows), row_of.kept, rows.shape[1])
            sets.append(row_of.values(row_of.unpack(part), dtype, SCRATCH.take(f"{self.name} {i}", shape, rows, dtype)))
        return Codes(sets, scale_of(rows[..., :1]).to(dtype).transpose(1, 2))


def scale_of(exponent: Tensor) -> Tensor:
    return torch.exp2(exponent.float() / OCTAVE)


class Coder(nn.Module):
    """Encodes what one attention caches, and decodes it."""

    key_mean: Tensor
    value_mean: Tensor
    pair_places: Tensor
    rates: Tensor

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__()
        self.spec = spec
        self.register_buffer("key_mean", torch.zeros(spec.key_heads * spec.d_qk))
        self.register_buffer("value_mean", torch.zeros(spec.key_heads * spec.d_v))
        self.shared, self.values = (
            Stage(spec.shared, spec.set_keys, "shared"),
            Stage(spec.values, spec.values.inputs, "values"),
        )
        for i, kept in enumerate(self.by_values(list(self.shared.kept))):
            self.register_buffer(f"predict_{i}", torch.empty(spec.values.inputs, sum(kept)))
        self.rounds = True  # False: coordinates are kept as they are, to test all but the rounding
        if spec.pairs:
            self.register_buffer("pair_places", torch.zeros(2 * spec.pairs, dtype=torch.int32))
            self.register_buffer("rates", torch.zeros(spec.pairs, dtype=torch.int32))  # bits of float32: no cast harms

    def is_like(self, other: Coder) -> bool:
        """Whether the other one reads what this one has written, as a copy does."""
        if self.spec != other.spec:
            return False
        pairs = zip(self.buffers(), other.buffers(), strict=True)
        return all(torch.equal(a, b.to(a.device, a.dtype)) for a, b in pairs)

    def by_values(self, shared: list[T]) -> list[list[T]]:
        """Something of every set of keys, by the sets of values that they belong to."""
        n = len(self.spec.shared.runs) // len(self.spec.values.runs)
        return [shared[i : i + n] for i in range(0, len(shared), n)]

    def predict(self, index: int) -> Tensor:
        return self.get_buffer(f"predict_{index}")

    def paired(self, states: Tensor) -> Tensor:
        """Queries or keys (…, d) with the dimensions of rotary pairs first: products of the two stay what they are."""
        if not self.spec.pairs:
            return states
        turned = self.pair_places.long()
        free = torch.ones(self.spec.d_qk, device=turned.device).index_fill(0, turned, 0.0)
        rest = free.argsort(descending=True, stable=True)[: self.spec.d_qk - len(turned)]
        return states.index_select(-1, torch.cat([turned, rest]))

    def turn(self, keys: Tensor, positions: Tensor, *, back: bool = False) -> Tensor:
        """Paired keys (b, g, d, t) turned as at these positions, (b or 1, t), or turned back."""
        pairs = self.spec.pairs
        if not pairs:
            return keys
        cos, sin = self.angles(positions, keys.dtype)
        first, second, rest = keys.split([pairs, pairs, self.spec.d_qk - 2 * pairs], -2)
        sign = 1 if back else -1
        turned = (
            torch.addcmul(first * cos, second, sin, value=sign),
            torch.addcmul(second * cos, first, sin, value=-sign),
        )
        return torch.cat([*turned, rest], -2)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of all pairs at positions, (b or 1, 1, pairs, t); a table holds them on a CPU."""
        if positions.device.type != "cpu" or torch.compiler.is_compiling():
            return cos_and_sin(self.rates.view(torch.float32)[:, None] * positions[:, None, None].float(), dtype)
        at = positions.clamp(min=0)  # before the start lies padding, which nobody sees
        rows = (int(at.max()) // TABLE + 1) * TABLE if at.numel() else TABLE
        table = turns(tuple(self.rates.view(torch.float32).tolist()), rows, dtype)
        cos, sin = (x[:, at].transpose(0, 1).unsqueeze(1) for x in table)
        return cos, sin

    def centred(self, key: Tensor, value: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys before positions and values, (b, numbers, t), without their means."""
        keys = self.turn(self.paired(key).transpose(2, 3), positions, back=True).flatten(1, 2)
        values = value.transpose(2, 3).flatten(1, 2)
        return keys - self.key_mean[:, None].to(keys.dtype), values - self.value_mean[:, None].to(values.dtype)

    def first_stage(self, keys: Tensor, values: Tensor) -> list[Tensor]:
        """The shared coordinates of centred keys and values."""
        sets = list(keys.chunk(len(self.spec.shared.runs), 1))
        if self.spec.joint:
            sets = [torch.cat(pair, 1) for pair in zip(sets, values.chunk(len(sets), 1), strict=True)]
        return self.shared.coordinates(sets)

    def missed(self, values: Tensor, shared: list[Tensor]) -> list[Tensor]:
        """What centred values are beside what shared coordinates predict, (b, inputs, t) of every set of values."""
        sets = values.chunk(len(self.spec.values.runs), 1)
        codes = [torch.cat(z, 1) for z in self.by_values(shared)]
        return [x - self.predict(i).to(x.dtype) @ z for i, (x, z) in enumerate(zip(sets, codes, strict=True))]

    def encode(self, key: Tensor, value: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of shared codes and of value codes for keys and values (b, g, t, d) at these positions."""
        keys, values = self.centred(key, value, positions)
        shared = self.first_stage(keys, values)
        rows, codes = self.shared.rows(shared)
        if self.values.is_empty:
            return rows, rows[..., :0]
        read = [z.to(key.dtype) for z in codes.scaled()]
        return rows, self.values.rows(self.values.coordinates(self.missed(values, read)))[0]

    def keys_of(self, shared: Codes, positions: Tensor) -> Tensor:
        """Paired keys as queries meet them, (b, g, d, t)."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            keys = torch.cat([self.shared.decode(i).to(z.dtype) @ z for i, z in enumerate(shared.sets)], 1)
            keys = keys * shared.scale + self.key_mean[:, None].to(keys.dtype)
            return self.turn(keys.unflatten(1, (self.spec.key_heads, -1)), positions)
        first, size = shared.sets[0], self.spec.set_keys
        shape = (len(first), len(self.key_mean), first.shape[2])
        keys = SCRATCH.take("keys", shape, first, first.dtype)
        for i, z in enumerate(shared.sets):
            torch.matmul(self.shared.decode(i).to(z.dtype), z, out=keys[:, i * size : (i + 1) * size])
        keys.mul_(shared.scale).add_(self.key_mean[:, None].to(keys.dtype))
        return self.turned(keys.unflatten(1, (self.spec.key_heads, -1)), positions)

    def turned(self, keys: Tensor, positions: Tensor) -> Tensor:
        """The same as `turn`, without asking for memory."""
        pairs = self.spec.pairs
        if not pairs:
            return keys
        cos, sin = self.angles(positions, keys.dtype)
        out = SCRATCH.take("turned", tuple(keys.shape), keys, keys.dtype)
        first, second = keys[:, :, :pairs], keys[:, :, pairs : 2 * pairs]
        torch.mul(first, cos, out=out[:, :, :pairs]).addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=out[:, :, pairs : 2 * pairs]).addcmul_(first, sin)
        out[:, :, 2 * pairs :] = keys[:, :, 2 * pairs :]
        return out

    def values_of(self, shared: Codes, own: Codes) -> Tensor:
        """Values, (b, g, t, d)."""
        sets = []
        for i, (z, r) in enumerate(zip(self.by_values(shared.scaled()), own.scaled(), strict=True)):
            predicted = self.predict(i).to(r.dtype) @ torch.cat(z, 1)
            sets.append(predicted + self.values.decode(i).to(r.dtype) @ r if r.shape[1] else predicted)
        values = torch.cat(sets, 1) + self.value_mean[:, None].to(sets[0].dtype)
        return values.unflatten(1, (self.spec.key_heads, -1)).transpose(2, 3)

    def gathered(self, weights: Tensor, shared: Codes, own: Codes) -> Tensor:
        """The values that one query of each head gathers by weights, (b, h, 1, t) → (b, h, 1, d)."""
        heads = self.spec.key_heads // len(self.spec.values.runs)  # key heads of a set of values
        outputs = []
        for i, share in enumerate(weights.squeeze(2).chunk(len(self.spec.values.runs), 1)):
            stages = [(z, shared.scale, way) for z, way in zip(*self.predictors(i, shared), strict=True)]
            stages += [(own.sets[i], own.scale, self.values.decode(i))]
            output = share.new_zeros(())
            for z, scale, way in stages:
                if z.shape[1]:
                    sums = ((share * scale) @ z.transpose(1, 2)).unflatten(1, (heads, -1))  # b heads queries kept
                    output = output + sums @ way.to(z.dtype).unflatten(0, (heads, -1)).transpose(1, 2)
            mean = self.value_mean.chunk(len(self.spec.values.runs))[i].to(share.dtype).view(heads, 1, -1)
            outputs.append((output + share.sum(-1).unflatten(1, (heads, -1))[..., None] * mean).flatten(1, 2))
        return torch.cat(outputs, 1).unsqueeze(2)

    def predictors(self, index: int, shared: Codes) -> tuple[list[Tensor], list[Tensor]]:
        """The shared coordinates that a set of values is predicted from, and the columns that do it."""
        sets = self.by_values(shared.sets)[index]
        return sets, list(self.predict(index).split([z.shape[1] for z in sets], 1))

    def simulate(self, key: Tensor, value: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Paired keys and values, (b, g, t, d), as they would come back from the cache."""
        keys, values = self.centred(key, value, positions)
        shared = self.first_stage(keys, values)
        shared = self.shared.rounded(shared) if self.rounds else shared
        own = self.values.coordinates(self.missed(values, shared))
        own = self.values.rounded(own) if self.rounds and not self.values.is_empty else own
        one = torch.ones_like(keys[:, :1])
        codes = Codes(shared, one)
        return self.keys_of(codes, positions).transpose(2, 3), self.values_of(codes, Codes(own, one))


@lru_cache(maxsize=4)
@torch.inference_mode(False)  # the next call may need gradients
def turns(rates: tuple[float, ...], rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines at positions 0, 1, …, (pairs, rows): layers turn alike, so one table serves them all."""
    return cos_and_sin(torch.tensor(rates)[:, None].float() * torch.arange(rows).float(), dtype)


def cos_and_sin(angle: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angle = angle.to(torch.promote_types(dtype, torch.float32))
    return angle.cos().to(dtype), angle.sin().to(dtype)
