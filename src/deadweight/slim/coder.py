"""From keys and values to rows of units, and back.

The key heads of an attention are divided into sets, and each set is coded on its own, in two stages. The first
transforms the pre-RoPE keys of the set to coordinates and rounds each to its bit width. Keys are decoded from these
codes. Values are predicted from them, because keys and values are computed from the same hidden state; the second stage
codes the residual. If keys and values are coded jointly, the first stage
transforms both as one vector, and there is no second.

    keys   = mean + key_decode · z
    values = mean + predict · z + value_decode · r        z: coordinates of keys, r: coordinates of values

The dimensions of keys are in the order of `Coder.paired`: the first dimension of every rotary pair, then the second
ones, then those in no pair. Coordinates and numbers of a set are (batch, sets, tokens, …).
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from .codes import Quantiser, Units, pack_units, scale_of, unpack_units
from .format import CacheSpec
from .scratch import SCRATCH

TABLE = 1024  # positions by which the table of angles grows
NUMBERS = itertools.count()
MADE = ("_prepared", "_cpu_maps", "_cpu_encoding")  # attributes that are computed from the buffers; a copy has its own


@dataclass(frozen=True)
class Codes:
    """Rows of a cache as numbers: codes of keys and of values times powers of two, and the scales of every token."""

    keys: Tensor  # (b, sets, t, slots)
    values: Tensor
    key_scale: Tensor  # (b, sets, t, 1)
    value_scale: Tensor


@dataclass(frozen=True, eq=False)
class Layout:
    """How the rows of one attention are laid out; constants that follow from it are kept for each of these values."""

    spec: CacheSpec
    units: Units


class Coder(nn.Module):
    """Encodes what one attention caches, and decodes it."""

    key_encode: Tensor
    key_decode: Tensor
    predict: Tensor
    value_encode: Tensor
    value_decode: Tensor
    key_mean_bits: Tensor
    value_mean_bits: Tensor
    pair_places: Tensor
    rates: Tensor

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__()
        self.spec = spec
        widths = torch.tensor(spec.widths, dtype=torch.long, device="cpu")  # also for models on the meta device
        self.layout = Layout(spec, Units.of(widths.transpose(1, 2).contiguous(), spec.key_fields))
        sets, keys, values = spec.n_sets, spec.n_units * spec.key_fields, spec.n_units * spec.value_fields
        for name, *shape in (
            ("key_encode", sets, keys, spec.inputs),
            ("key_decode", sets, keys, spec.set_keys),
            ("predict", sets, keys, spec.set_values),
            ("value_encode", sets, values, spec.set_values),
            ("value_decode", sets, values, spec.set_values),
        ):
            self.register_buffer(name, torch.zeros(shape))
        for name, size in (("key_mean_bits", spec.d_qk), ("value_mean_bits", spec.d_v)):
            self.register_buffer(name, torch.zeros(spec.key_heads * size, dtype=torch.int32))
        self.enlist()
        self.rounds = True  # False: coordinates are not rounded, to test everything else
        if spec.pairs:
            self.register_buffer("pair_places", torch.zeros(2 * spec.pairs, dtype=torch.int32))
            self.register_buffer(
                "rates", torch.zeros(spec.pairs, dtype=torch.int32)
            )  # bits of float32, as means: no cast harms

    @property
    def key_mean(self) -> Tensor:
        """The means of pre-RoPE keys: large where keys have biases, and float32 whatever the model is cast to."""
        return self.key_mean_bits.view(torch.float32)

    @property
    def value_mean(self) -> Tensor:
        return self.value_mean_bits.view(torch.float32)

    def enlist(self) -> None:
        """Register this coder under a number: torch operators take only numbers and tensors."""
        self.number = next(NUMBERS)
        CODERS[self.number] = self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy has a number of its own."""
        super().__setstate__({name: value for name, value in state.items() if name not in MADE})
        self.enlist()

    def is_like(self, other: Coder) -> bool:
        """Whether the other coder can read what this one has written; true for a copy."""
        if self.spec != other.spec:
            return False
        pairs = zip(self.buffers(), other.buffers(), strict=True)
        return all(torch.equal(a, b.to(a.device, a.dtype)) for a, b in pairs)

    def expect_states(self, key: Tensor, value: Tensor) -> None:
        """Raise ValueError for keys and values, (b, g, t, d), of another shape than the format says."""
        spec = self.spec
        shapes = (*key.shape[1::2], *value.shape[1::2])
        expected = (spec.key_heads, spec.d_qk, spec.key_heads, spec.d_v)
        if shapes != expected:
            raise ValueError(f"found key heads and dimensions of keys and values {shapes}; expected {expected}")

    @property
    def order(self) -> Tensor:
        """The dimensions of a head: first ones of rotary pairs, second ones, those in no pair."""
        turned = self.pair_places.long()
        free = torch.ones(self.spec.d_qk, device=turned.device).index_fill(0, turned, 0.0)
        rest = free.argsort(descending=True, stable=True)[: self.spec.d_qk - len(turned)]
        return torch.cat([turned, rest])

    def paired(self, states: Tensor) -> Tensor:
        """Queries or keys (…, d) with the dimensions of rotary pairs first; their products do not change."""
        return states.index_select(-1, self.order) if self.spec.pairs else states

    def turn(self, keys: Tensor, positions: Tensor, *, back: bool = False) -> Tensor:
        """Paired keys (b, g, t, d) rotated to these positions, (b or 1, t), or rotated back."""
        pairs = self.spec.pairs
        if not pairs:
            return keys
        cos, sin = self.angles(positions, keys.dtype)
        first, second, rest = keys.split([pairs, pairs, self.spec.d_qk - 2 * pairs], -1)
        sign = 1 if back else -1
        turned = (
            torch.addcmul(first * cos, second, sin, value=sign),
            torch.addcmul(second * cos, first, sin, value=-sign),
        )
        return torch.cat([*turned, rest], -1)

    def turn_in_place(self, keys: Tensor, positions: Tensor) -> Tensor:
        """The same, in the memory of the keys."""
        pairs = self.spec.pairs
        if pairs:
            cos, sin = self.angles(positions, keys.dtype)
            first, second = keys[..., :pairs], keys[..., pairs : 2 * pairs]
            kept = SCRATCH.take("first of pairs", tuple(first.shape), keys, keys.dtype).copy_(first)
            first.mul_(cos).addcmul_(second, sin, value=-1)
            second.mul_(cos).addcmul_(kept, sin)
        return keys

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of all pairs at positions, (b or 1, 1, t, pairs); a table holds them on a CPU.

        Angles are computed in float64 and then rounded: a kernel that adds them up tile by tile gets the same.
        """
        rates = self.rates.view(torch.float32)
        if positions.device.type != "cpu" or torch.compiler.is_compiling():
            return cos_and_sin(positions[:, None, :, None].double() * rates.double(), dtype)
        at = positions.clamp(min=0)  # before the start there is padding, which no query sees
        rows = (int(at.max()) // TABLE + 1) * TABLE if at.numel() else TABLE
        cos, sin = (x[at].unsqueeze(1) for x in turns(tuple(rates.tolist()), rows, dtype))
        return cos, sin

    def by_sets(self, states: Tensor) -> Tensor:
        """(b, g, t, d) as (b, sets, t, numbers of a set)."""
        return states.unflatten(1, (self.spec.n_sets, -1)).transpose(2, 3).flatten(3)

    def by_heads(self, numbers: Tensor) -> Tensor:
        """(b, sets, t, numbers of a set) as (b, g, t, d)."""
        heads = self.spec.key_heads // self.spec.n_sets
        return numbers.unflatten(3, (heads, -1)).transpose(2, 3).flatten(1, 2)

    def centred(self, key: Tensor, value: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Pre-RoPE keys and values of every set, without their means."""
        keys = self.by_sets(self.turn(self.paired(key), positions, back=True))
        return keys - self.mean_of(self.key_mean, keys), self.by_sets(value) - self.mean_of(self.value_mean, value)

    def mean_of(self, mean: Tensor, like: Tensor) -> Tensor:
        return mean.to(like.dtype).view(self.spec.n_sets, 1, -1)

    def key_coordinates(self, keys: Tensor, values: Tensor) -> Tensor:
        """Coordinates of the first stage, of centred keys and values."""
        inputs = torch.cat([keys, values], -1) if self.spec.joint else keys
        return (inputs @ self.key_encode.to(keys.dtype).mT).to(precise(keys.dtype))

    def missed(self, values: Tensor, z: Tensor) -> Tensor:
        """Coordinates of the residual: centred values less what the coordinates of keys predict."""
        missed = (values - z @ self.predict.to(z.dtype)) @ self.value_encode.to(z.dtype).mT
        return missed.to(precise(z.dtype))

    def encode(self, key: Tensor, value: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rows and exponents for keys and values (b, g, t, d) at these positions, as bytes."""
        keys, values = self.centred(key, value, positions)
        quantise_keys, quantise_values = self.quantisers(keys)
        codes, exponent, z = quantise_keys.rounded(self.key_coordinates(keys, values))
        if self.spec.value_fields:
            more, higher, _ = quantise_values.rounded(self.missed(values, z.to(values.dtype)))
            codes, exponent = torch.cat([codes, more], -1), exponent | (higher << 4)
        return pack_units(self.layout.units, codes), exponent

    def quantisers(self, like: Tensor) -> tuple[Quantiser, Quantiser]:
        return quantisers_of(self.layout, precise(like.dtype), like.device)

    def read(self, rows: Tensor, exponents: Tensor, dtype: torch.dtype) -> Codes:
        """Unpack the rows of a cache."""
        numbers = unpack_units(rows, masks_of(self.layout, rows.device), self.layout.units.low, dtype)
        n = self.spec.n_units * self.spec.key_fields
        return Codes(
            numbers[..., :n], numbers[..., n:], scale_of(exponents & 15, dtype), scale_of(exponents >> 4, dtype)
        )

    def map_of(self, decode: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A transform of coordinates as one of the unpacked numbers of rows: x ↦ x · map + constant."""
        first = 0 if decode is not self.value_decode else self.spec.key_fields
        scale, centre = folds_of(self.layout, dtype, decode.device)
        at = slice(first * self.spec.n_units, first * self.spec.n_units + decode.shape[1])
        folded = decode.to(dtype) * scale[:, at]
        return folded, -(centre[:, at] * folded).sum(1, keepdim=True)

    def keys_of(self, codes: Codes, positions: Tensor) -> Tensor:
        """Paired keys after RoPE, (b, g, t, d)."""
        to_keys, constant = self.map_of(self.key_decode, codes.keys.dtype)
        keys = codes.keys @ to_keys
        mean = self.mean_of(self.key_mean, keys)
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.turn(self.by_heads((keys + constant) * codes.key_scale + mean), positions)
        keys.add_(constant).mul_(codes.key_scale).add_(mean)
        return self.turn_in_place(self.by_heads(keys), positions)

    def values_of(self, codes: Codes) -> Tensor:
        """Values, (b, g, t, d)."""
        predict, constant = self.map_of(self.predict, codes.keys.dtype)
        values = (codes.keys @ predict + constant) * codes.key_scale
        if self.spec.value_fields:
            decode, constant = self.map_of(self.value_decode, codes.keys.dtype)
            values = values + (codes.values @ decode + constant) * codes.value_scale
        return self.by_heads(values + self.mean_of(self.value_mean, values))

    def gathered(self, weights: Tensor, codes: Codes) -> Tensor:
        """The weighted sum of values for one query of each head, (b, h, 1, t) → (b, h, 1, d)."""
        sets, heads = self.spec.n_sets, self.spec.key_heads // self.spec.n_sets
        share = weights.squeeze(2).unflatten(1, (sets, -1))  # b sets queries t
        stages = [(codes.keys, codes.key_scale, self.predict)]
        stages += [(codes.values, codes.value_scale, self.value_decode)] if self.spec.value_fields else []
        mean = self.value_mean.to(share.dtype).view(sets, heads, 1, -1)
        output = share.sum(-1).unflatten(2, (heads, -1))[..., None] * mean  # b sets heads queries d
        for numbers, scale, decode in stages:
            folded, constant = self.map_of(decode, numbers.dtype)
            scaled = share * scale.mT
            sums = (scaled @ numbers).unflatten(2, (heads, -1))  # b sets heads queries slots
            ways = folded.unflatten(2, (heads, -1)).transpose(1, 2)  # sets heads slots d
            start = constant.unflatten(2, (heads, -1)).transpose(1, 2)
            output = output + sums @ ways + scaled.sum(-1).unflatten(2, (heads, -1))[..., None] * start
        return output.flatten(1, 3).unsqueeze(2)

    def simulate(self, key: Tensor, value: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Paired keys and values, (b, g, t, d), as they would come back from the cache.

        Gradients pass through rounding unchanged.
        """
        keys, values = self.centred(key, value, positions)
        quantise_keys, quantise_values = self.quantisers(keys)
        z = self.straight_through(quantise_keys, self.key_coordinates(keys, values)).to(keys.dtype)
        read = z @ self.predict.to(z.dtype)
        if self.spec.value_fields:
            r = self.straight_through(quantise_values, self.missed(values, z)).to(keys.dtype)
            read = read + r @ self.value_decode.to(z.dtype)
        read_keys = z @ self.key_decode.to(z.dtype) + self.mean_of(self.key_mean, z)
        return self.turn(self.by_heads(read_keys), positions), self.by_heads(read + self.mean_of(self.value_mean, z))

    def straight_through(self, quantiser: Quantiser, coordinates: Tensor) -> Tensor:
        if not self.rounds:
            return coordinates
        with torch.no_grad():
            read = quantiser.rounded(coordinates)[2]
        return coordinates + (read - coordinates).detach()


CODERS: weakref.WeakValueDictionary[int, Coder] = weakref.WeakValueDictionary()


def precise(dtype: torch.dtype) -> torch.dtype:
    """The precision for rounding coordinates: in half precision, rounding errors would change codes."""
    return torch.promote_types(dtype, torch.float32)


@lru_cache(maxsize=1024)
@torch.inference_mode(False)  # the next call may need gradients
def masks_of(layout: Layout, device: torch.device) -> Tensor:
    return layout.units.masks.to(device, torch.int16).unsqueeze(2)


@lru_cache(maxsize=1024)
@torch.inference_mode(False)
def quantisers_of(layout: Layout, dtype: torch.dtype, device: torch.device) -> tuple[Quantiser, Quantiser]:
    widths, n, like = layout.units.widths, layout.spec.key_fields, torch.empty(0, dtype=dtype, device=device)
    return Quantiser.of(widths[:, :n], like), Quantiser.of(widths[:, n:], like)


@lru_cache(maxsize=1024)
@torch.inference_mode(False)
def folds_of(layout: Layout, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """For every slot, (sets, slots, 1): the factor from the number in a row to its code, and the middle code."""
    scale, centre = torch.exp2(-layout.units.shifts.double()), layout.units.masks.double() / 2
    return tuple(x.flatten(1).unsqueeze(2).to(device, dtype) for x in (scale, centre))  # type: ignore[return-value]


@lru_cache(maxsize=4)
@torch.inference_mode(False)
def turns(rates: tuple[float, ...], rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines at positions 0, 1, …, (rows, pairs); layers with equal frequencies share one table."""
    return cos_and_sin(torch.arange(rows).double()[:, None] * torch.tensor(rates).double(), dtype)


def cos_and_sin(angle: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return angle.cos().to(dtype), angle.sin().to(dtype)
