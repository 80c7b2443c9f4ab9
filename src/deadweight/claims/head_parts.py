"""A part of the group under which queries meet keys, and how its members act on both."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from deadweight.claims.action import Blockwise, Element
from deadweight.claims.claim import normal
from deadweight.proof.commutant import Part


@dataclass(frozen=True)
class HeadPart:
    """A part of the group of all heads that share keys, by coordinates: of every query head, and of the keys."""

    head: int  # which key head
    part: Part
    queries: Int64[Tensor, "heads count n"]
    keys: Int64[Tensor, "count n"]
    allowed: Float64[Tensor, "directions count count entry"] | None = None  # behind a norm; None: all

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.queries.shape, self.part.entry, self.allowed is not None)

    @property
    def dimension(self) -> int:
        return self.part.dimension if self.allowed is None else len(self.allowed)

    def random(self, generator: torch.Generator) -> Float64[Tensor, "count count entry"]:
        count, entry = self.part.count, self.part.entry
        if self.allowed is None:
            return normal(generator, count, count, entry)
        return torch.einsum("d,dklb->klb", normal(generator, len(self.allowed)), self.allowed)

    @property
    def left(self) -> tuple[Tensor, ...]:
        """The coordinates of every query head, and of the keys, in one row each."""
        return tuple(head.reshape(-1) for head in self.queries)

    @property
    def right(self) -> Tensor:
        return self.keys.reshape(-1)


def by_shape(parts: Iterable[HeadPart]) -> list[list[HeadPart]]:
    groups: dict[tuple[int, ...], list[HeadPart]] = {}
    for part in parts:
        groups.setdefault(part.shape, []).append(part)
    return list(groups.values())


def turn_of(alike: list[HeadPart], z: Float64[Tensor, "parts count count entry"], *, finite: bool) -> Element:
    """X = T·Z·T⁻¹ on queries and Y = −W·Zᵀ·W⁻¹ on keys; as members of the group 1 + X and (1 − Y)⁻¹, or e^X and e^Y."""
    heads, count, n, _, normed = alike[0].shape
    size = count * n
    t, w, e, f = (
        torch.stack([getattr(p.part, name) for p in alike])
        for name in ("left_basis", "right_basis", "left_entries", "right_entries")
    )
    x = torch.einsum("pkij,pklb,pbjm,plmo->pkilo", t, z, e, torch.linalg.inv(t)).reshape(-1, size, size)
    y = -torch.einsum("pkij,plkb,pbjm,plmo->pkilo", w, z, f, torch.linalg.inv(w)).reshape(-1, size, size)
    if finite and normed:
        x, y = (torch.linalg.matrix_exp(z) - torch.eye(size, dtype=torch.float64) for z in (x, y))
    elif finite:
        y = torch.linalg.solve(torch.eye(size, dtype=torch.float64) - y, y)
    queries = torch.stack([p.queries.reshape(heads, size) for p in alike], 1).reshape(-1, size)
    keys = torch.stack([p.right for p in alike])
    return Blockwise.dense(queries, x.repeat(heads, 1, 1)), Blockwise.dense(keys, y)
