"""From keys and values to rows of bytes, and back.

A set of key heads is coded in two stages. The first, *shared*, transforms the keys of the set, before rotary positions,
to coordinates and rounds each to as many bits as its width says. Keys are read from these codes alone. Values are
predicted from them, because keys and values are made of the same hidden state; the second stage codes what the
prediction misses. If keys and values are coded jointly, the first stage transforms both as one vector.

    keys   = mean + decode_keys · z
    values = mean + predict · z + decode · r        z: shared codes, r: codes of the values stage
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .codes import row
from .format import CacheSpec, CodeSpec

if TYPE_CHECKING:
    from .cache import Call

OCTAVE = 8  # steps of the scale of a token: it is 2^(n / 8)


@dataclass(frozen=True)
class Codes:
    """Coordinates that were read from rows: (b, t, kept) of every set, to be multiplied by a scale of each token."""

    sets: list[Tensor]
    scale: Tensor  # (b, t, 1)

    def scaled(self) -> list[Tensor]:
        return [z * self.scale for z in self.sets]


class Stage(nn.Module):
    """One stage: encode makes coordinates of the numbers of a set, decode makes `outputs` numbers of coordinates."""

    def __init__(self, spec: CodeSpec, outputs: int) -> None:
        super().__init__()
        self.spec = spec
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
        """Of the numbers of every set, (b, t, inputs), the coordinates (b, t, kept)."""
        return [F.linear(x, self.encode(i).to(x.dtype)) for i, x in enumerate(sets)]

    def exponent(self, coordinates: list[Tensor]) -> Tensor:
        """By how many steps the scale of a token must grow for nothing to be clipped, (b, t) as integers from 0 on."""
        largest = torch.ones(coordinates[0].shape[:-1], device=coordinates[0].device)
        for z, row_of in zip(coordinates, self.row, strict=True):
            if row_of.kept:
                largest = torch.maximum(largest, (z.float().abs() / row_of.reach.to(z.device)).amax(-1))
        largest = torch.nan_to_num(largest, nan=math.inf)
        return (torch.log2(largest) * OCTAVE).ceil().clamp(max=255).to(torch.uint8)

    def rounded(self, coordinates: list[Tensor]) -> list[Tensor]:
        """The coordinates as they would come back from the cache; gradients pass as if nothing had been rounded."""
        scale = scale_of(self.exponent(coordinates))[..., None]
        pairs = zip(coordinates, self.row, strict=True)
        values = [row_of.values(row_of.encode(z.float() / scale), torch.float32) * scale for z, row_of in pairs]
        return [z + (value.to(z.dtype) - z).detach() for z, value in zip(coordinates, values, strict=True)]

    def rows(self, coordinates: list[Tensor]) -> Tensor:
        """Coordinates as bytes, (b, 1, t, row_bytes)."""
        if self.is_empty:
            return coordinates[0].new_zeros(*coordinates[0].shape[:-1], 0, dtype=torch.uint8).unsqueeze(1)
        exponent = self.exponent(coordinates)
        scale = scale_of(exponent)[..., None]
        pairs = zip(coordinates, self.row, strict=True)
        packed = [row_of.pack(row_of.encode(z.float() / scale)) for z, row_of in pairs]
        return torch.cat([exponent[..., None], *packed], -1).unsqueeze(1)

    def read(self, rows: Tensor, dtype: torch.dtype) -> Codes:
        """The coordinates that rows of bytes hold."""
        rows = rows.squeeze(1)
        if self.is_empty:
            empty = rows.new_zeros(*rows.shape[:-1], 0, dtype=dtype)
            return Codes([empty] * len(self.row), rows.new_ones(*rows.shape[:-1], 1, dtype=dtype))
        parts = rows[..., 1:].split([row_of.size for row_of in self.row], -1)
        sets = [row_of.values(row_of.unpack(part), dtype) for part, row_of in zip(parts, self.row, strict=True)]
        return Codes(sets, scale_of(rows[..., :1]).to(dtype))


def scale_of(exponent: Tensor) -> Tensor:
    return torch.exp2(exponent.float() / OCTAVE)


class Coder(nn.Module):
    """Encodes what one attention caches, and decodes it."""

    mean: Tensor  # (sets, keys and values of a set)
    pair_places: Tensor
    rates: Tensor
    call: Call | None = None  # what the attention module is being called with; the interface of transformers hides it

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__()
        self.spec = spec
        size = spec.set_keys + spec.set_values
        self.register_buffer("mean", torch.zeros(spec.sets, size))
        self.shared, self.values = Stage(spec.shared, size), Stage(spec.values, spec.set_values)
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

    def turn(self, keys: Tensor, positions: Tensor, *, back: bool = False) -> Tensor:
        """Keys (b, g, t, d) turned as at these positions, (b or 1, t), or turned back.

        Each number becomes cos · itself ± sin · its partner; those that positions do not turn have angle 0.
        """
        if not self.spec.pairs:
            return keys
        first, second = self.pair_places.long().chunk(2)
        partner = torch.arange(self.spec.d_qk, device=keys.device)
        partner = partner.index_copy(0, first, second).index_copy(0, second, first)
        rates = torch.zeros(self.spec.d_qk, device=keys.device)
        rates = rates.index_copy(0, first, -self.rates.view(torch.float32))
        rates = rates.index_copy(0, second, self.rates.view(torch.float32))
        angle = positions[..., None].float() * (-rates if back else rates)
        angle = angle.to(torch.promote_types(keys.dtype, torch.float32))
        cos, sin = (f(angle).unsqueeze(1).to(keys.dtype) for f in (torch.cos, torch.sin))
        return torch.addcmul(keys * cos, keys.index_select(-1, partner), sin)

    def centred(self, key: Tensor, value: Tensor, positions: Tensor) -> list[Tensor]:
        """Keys before positions and values of every set as one vector, (b, t, size), without its mean."""
        keys, values = self.sets(self.turn(key, positions, back=True)), self.sets(value)
        mean = self.mean.to(key.dtype)
        return [torch.cat(pair, -1) - mean[i] for i, pair in enumerate(zip(keys, values, strict=True))]

    def sets(self, states: Tensor) -> tuple[Tensor, ...]:
        """Heads (b, g, t, d) as vectors of every set, (b, t, size)."""
        return states.unflatten(1, (self.spec.sets, -1)).transpose(2, 3).flatten(3).unbind(1)

    def heads(self, sets: list[Tensor]) -> Tensor:
        """Vectors of every set as heads (b, g, t, d)."""
        return torch.stack(sets, 1).unflatten(-1, (self.spec.set_heads, -1)).transpose(2, 3).flatten(1, 2)

    def missed(self, centred: list[Tensor], shared: list[Tensor]) -> list[Tensor]:
        """What values are beside what shared codes predict."""
        keys = self.spec.set_keys
        return [
            x[..., keys:] - F.linear(z, self.shared.decode(i)[keys:].to(z.dtype))
            for i, (x, z) in enumerate(zip(centred, shared, strict=True))
        ]

    def encode(self, key: Tensor, value: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of shared codes and of value codes for keys and values at these positions."""
        centred = self.centred(key, value, positions)
        shared = self.shared.coordinates([x[..., : self.spec.shared.inputs] for x in centred])
        rows = F.pad(self.shared.rows(shared), (0, int(self.shared.is_empty)))
        if self.values.is_empty:
            return rows, self.values.rows(shared)
        read = [z.to(key.dtype) for z in self.shared.read(rows, torch.float32).scaled()]
        return rows, self.values.rows(self.values.coordinates(self.missed(centred, read)))

    def keys_of(self, shared: Codes, positions: Tensor) -> Tensor:
        """Keys as queries meet them, (b, g, t, d)."""
        size, sets = self.spec.set_keys, []
        for i, z in enumerate(shared.sets):
            keys = F.linear(z, self.shared.decode(i)[:size].to(z.dtype))
            sets.append(torch.addcmul(self.mean[i, :size].to(z.dtype), keys, shared.scale))
        return self.turn(self.heads(sets), positions)

    def values_of(self, shared: Codes, own: Codes) -> Tensor:
        """Values, (b, g, t, d)."""
        size, sets = self.spec.set_keys, []
        for i, (z, r) in enumerate(zip(shared.scaled(), own.scaled(), strict=True)):
            predicted = F.linear(z, self.shared.decode(i)[size:].to(z.dtype), self.mean[i, size:].to(z.dtype))
            sets.append(predicted if not r.shape[-1] else predicted + F.linear(r, self.values.decode(i).to(r.dtype)))
        return self.heads(sets)

    def gathered(self, weights: Tensor, shared: Codes, own: Codes) -> Tensor:
        """The values that one query of each head gathers by weights, (b, h, 1, t) → (b, h, 1, d)."""
        outputs, size = [], self.spec.set_keys
        for i, share in enumerate(weights.squeeze(2).chunk(self.spec.sets, 1)):
            mean = self.mean[i, size:].to(share.dtype).unflatten(0, (self.spec.set_heads, -1))[:, None]
            output = share.sum(-1).unflatten(1, (self.spec.set_heads, -1))[..., None] * mean
            for codes, decode in ((shared, self.shared.decode(i)[size:]), (own, self.values.decode(i))):
                if codes.sets[i].shape[-1]:
                    ways = decode.to(share.dtype).unflatten(0, (self.spec.set_heads, -1)).transpose(1, 2)
                    sums = (share * codes.scale.transpose(1, 2)) @ codes.sets[i]  # b h kept
                    output = output + sums.unflatten(1, (self.spec.set_heads, -1)) @ ways
            outputs.append(output.flatten(1, 2))
        return torch.cat(outputs, 1).unsqueeze(2)

    def simulate(self, key: Tensor, value: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as they would come back from the cache."""
        centred = self.centred(key, value, positions)
        shared = self.shared.coordinates([x[..., : self.spec.shared.inputs] for x in centred])
        shared = self.shared.rounded(shared) if self.rounds else shared
        own = self.values.coordinates(self.missed(centred, shared))
        own = self.values.rounded(own) if self.rounds and not self.values.is_empty else own
        one = torch.ones_like(centred[0][..., :1])
        keys, values = Codes(shared, one), Codes(own, one)
        return self.keys_of(keys, positions), self.values_of(keys, values)
