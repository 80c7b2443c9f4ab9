"""How coordinates are rounded to a few bits, and how their codes lie in 16-bit units.

A coordinate is given in steps of its quantiser. With w bits its code is one of 0 … 2ʷ − 1 and stands for the value
scale · (code − (2ʷ − 1) / 2): a uniform quantiser, so that a decoder is a matrix product with the codes themselves.

Every token has a scale; for most it is 1. It is 2^(e² / 32) for an exponent e from 0 to 15: fine near 1, and wide
enough for a token that is a hundred times larger than the others. An exponent takes four bits.

A row of a token is a number of 16-bit units, each shared by several codes. The codes of a unit are in two halves. The
lower half takes the bits from 0, ten at most; the upper half starts behind it, at bit 6 at the earliest. Then both
halves fit into the ten bits of a float16 mantissa, the upper one after a shift by 6, and a GPU turns codes into numbers
with a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .scratch import SCRATCH

UNIT = 16  # bits
WIDEST = 8  # bits of a code
LOW_BITS = 10  # of the lower half of a unit, at most
SHIFT = 6  # where the upper half starts at the earliest
EXPONENTS = 16
FINENESS = 32  # the scale is 2^(e² / FINENESS)

# For widths 0 to 8: the best step for a normal variable of unit variance, and the mean squared error it leaves.
STEPS = (0.0, 1.595769, 0.995687, 0.586019, 0.335201, 0.188139, 0.104063, 0.056868, 0.030762)
STEP_ERRORS = (1.0, 0.363380, 0.118846, 0.037440, 0.011543, 0.003495, 0.001040, 0.000304, 0.000088)


def in_low_half(key_fields: int, value_fields: int) -> list[bool]:
    """Which codes of a unit lie in its lower half: the first half of those of keys, and of those of values."""
    keys = [field < (key_fields + 1) // 2 for field in range(key_fields)]
    return keys + [field < value_fields // 2 for field in range(value_fields)]


@dataclass(frozen=True)
class Units:
    """The units of the rows of every set of heads: for each code its width and its first bit, (sets, fields, units)."""

    key_fields: int  # codes of keys in a unit; those of values follow
    widths: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, widths: Tensor, key_fields: int) -> Units:
        """From the widths of all codes, (sets, fields, units)."""
        low = in_low_half(key_fields, widths.shape[1] - key_fields)
        offsets = torch.zeros_like(widths)
        ends = [torch.zeros_like(widths[:, 0]), widths[:, low].sum(1).clamp(min=SHIFT)]
        for field, is_low in enumerate(low):
            offsets[:, field] = ends[not is_low]
            ends[not is_low] = ends[not is_low] + widths[:, field]
        return cls(key_fields, widths, offsets)

    @property
    def n_units(self) -> int:
        return self.widths.shape[2]

    @property
    def low(self) -> list[bool]:
        return in_low_half(self.key_fields, self.widths.shape[1] - self.key_fields)

    @property
    def shifts(self) -> Tensor:
        """The bits by which a code is shifted up when a mask selects it; the upper half is shifted down first."""
        low = torch.tensor(self.low, device=self.widths.device)[:, None]
        return torch.where(low | (self.widths == 0), self.offsets, self.offsets - SHIFT) * (self.widths > 0)

    @property
    def masks(self) -> Tensor:
        """The bits of a code, at its place after that shift."""
        return ((1 << self.widths) - 1) << self.shifts


@dataclass(frozen=True)
class Quantiser:
    """Rounds the coordinates of one stage; its tensors are (sets, 1, slots), to go with (…, sets, tokens, slots).

    Slots are the codes of a row: all units of the first field, then of the second … A slot without bits is not stored.
    """

    levels: Tensor  # 2ʷ
    reach: Tensor  # the largest coordinate that is not clipped; infinite where one bit stores only the sign

    @classmethod
    def of(cls, widths: Tensor, like: Tensor) -> Quantiser:
        """From widths (sets, fields, units), in the precision and on the device of another tensor."""
        flat = widths.flatten(1).unsqueeze(1)
        levels = torch.exp2(flat.double())
        reach = torch.where(flat > 1, levels / 2, torch.inf)
        return cls(levels.to(like.device, like.dtype), reach.to(like.device, like.dtype))

    def exponent(self, coordinates: Tensor) -> Tensor:
        """The smallest exponent of every token that clips nothing, (…, tokens, 1) as uint8."""
        largest = (coordinates.abs() / self.reach).amax(-1, keepdim=True) if coordinates.shape[-1] else None
        if largest is None:
            return torch.zeros(*coordinates.shape[:-1], 1, dtype=torch.uint8, device=coordinates.device)
        largest = torch.nan_to_num(largest.float(), nan=torch.inf).clamp(min=1.0)
        return (torch.log2(largest) * FINENESS).sqrt().ceil().clamp(max=EXPONENTS - 1).to(torch.uint8)

    def codes(self, coordinates: Tensor, scale: Tensor) -> Tensor:
        """The nearest codes, as floating-point numbers."""
        codes = torch.floor(coordinates / scale + self.levels / 2)
        return torch.minimum(codes.clamp_(min=0), self.levels - 1)

    def values(self, codes: Tensor, scale: Tensor) -> Tensor:
        """The coordinates that codes stand for."""
        return (codes - (self.levels - 1) / 2) * scale

    def rounded(self, coordinates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes and exponents of coordinates, and the coordinates as they will be decoded."""
        exponent = self.exponent(coordinates)
        scale = scale_of(exponent, coordinates.dtype)
        codes = self.codes(coordinates, scale)
        return codes, exponent, self.values(codes, scale)


def scale_of(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.exp2(exponent.to(torch.promote_types(dtype, torch.float32)).square() / FINENESS).to(dtype)


def pack_units(units: Units, codes: Tensor) -> Tensor:
    """(…, sets, tokens, slots) codes as rows of bytes, (…, sets, tokens, 2 · units)."""
    fields = codes.to(torch.int32).unflatten(-1, (-1, units.n_units))
    packed = (fields << units.offsets.to(codes.device, torch.int32).unsqueeze(1)).sum(-2, dtype=torch.int32)
    signed = torch.where(packed >= 1 << (UNIT - 1), packed - (1 << UNIT), packed).to(torch.int16)
    return signed.contiguous().view(torch.uint8)


def unpack_units(rows: Tensor, masks: Tensor, low: Sequence[bool], dtype: torch.dtype) -> Tensor:
    """Rows of bytes as numbers: every code times two to its shift, (…, sets, tokens, slots).

    `masks` are those of `Units`, (sets, fields, 1, units) as int16 on the device of the rows.
    """
    units = rows.view(torch.int16) if rows.shape[-1] else rows.to(torch.int16)
    shape = (*units.shape[:-1], len(low) * units.shape[-1])
    numbers = SCRATCH.take("numbers", shape, rows, dtype)
    by_field = numbers.unflatten(-1, (len(low), -1))
    upper = units >> SHIFT
    for field, is_low in enumerate(low):
        by_field[..., field, :] = (units if is_low else upper) & masks[:, field]
    return numbers
