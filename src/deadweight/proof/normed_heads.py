"""A norm of each head between projection and product: which turns keep the length that it divides by.

v = R·x has the length xᵀ·G·x with G = Rᵀ·R, where R holds the factors of v's elements (rotary: cosines and sines). A
direction X keeps it for every x exactly if G·X is antisymmetric. R is a matrix of random elements of the field, as
elsewhere: cos² + sin² = 1 is not used, and not needed, since both elements of a rotary pair share the sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from deadweight.proof import field
from deadweight.proof.labels import fold, fresh
from deadweight.proof.linear_form import Form

VECTORS = 16  # of different factors, for each set of coordinates; of more, so many random sums of all G


@dataclass(frozen=True)
class Gram:
    """G for several vectors of the same coordinates."""

    coordinates: Tensor  # sorted
    values: Int64[Tensor, "vectors n n"]

    def on(self, part: Tensor) -> Int64[Tensor, "vectors m m"] | None:
        """G on some of the coordinates; None if it links them to others."""
        place = torch.searchsorted(self.coordinates, part.contiguous())
        rest = torch.ones(len(self.coordinates), dtype=torch.bool)
        rest[place] = False
        linked = bool((self.values[:, place][:, :, rest] != 0).any())
        return None if linked else self.values[:, place][:, :, place]


def grams(form: Form) -> list[Gram]:
    """G for every set of coordinates that is normed, from the form before the norm."""
    coordinate = torch.stack(torch.broadcast_tensors(*[s.coordinate for s in form.slots])).flatten(1, -2)
    factor = torch.stack(torch.broadcast_tensors(*[s.factor for s in form.slots])).flatten(1, -2)
    coordinate = torch.where(factor == 0, 0, coordinate).movedim(1, 0)  # vectors × slots × width
    factor = factor.movedim(1, 0)
    kinds = torch.unique(coordinate.flatten(1), dim=0, return_inverse=True)[1]
    found = []
    for kind in kinds.unique().tolist():
        here = (kinds == kind).nonzero().reshape(-1)
        first = {int(label): place for place, label in zip(here.flip(0).tolist(), labels(factor[here]), strict=True)}
        found.append(few(gram_of(coordinate[here[0]], factor[sorted(first.values())])))
    return [gram for gram in found if len(gram.coordinates)]


def labels(factor: field.Elements) -> list[int]:
    """Equal where all factors are, in reversed order of vectors."""
    return fold(factor.flatten(1) + 1, 1).flip(0).tolist()


def few(gram: Gram) -> Gram:
    """That G·X is antisymmetric is linear in G: what fails for one fails for a random sum of all."""
    if len(gram.values) <= VECTORS:
        return gram
    weights = field.generic(fresh((VECTORS, len(gram.values)), "vectors"))
    sums = field.matmul(weights, gram.values.flatten(1)).reshape(VECTORS, *gram.values.shape[1:])
    return Gram(gram.coordinates, sums)


def gram_of(coordinate: Int64[Tensor, "slots width"], factor: Int64[Tensor, "vectors slots width"]) -> Gram:
    present = coordinate[coordinate != 0].unique()
    rows = torch.zeros(len(factor), coordinate.shape[1], len(present), dtype=torch.int64)
    place = torch.searchsorted(present, coordinate.contiguous()).clamp_max(max(len(present) - 1, 0))
    for slot in range(len(coordinate)):
        inside = (coordinate[slot] != 0).nonzero().reshape(-1)
        old = rows[:, inside, place[slot, inside]]
        rows[:, inside, place[slot, inside]] = field.plus(old, factor[:, slot, inside])
    return Gram(present, field.matmul(rows.mT.contiguous(), rows)) if len(present) else Gram(present, rows[:, :0])
