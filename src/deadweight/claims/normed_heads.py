"""Heads that are normed before queries meet keys: of the turns that leave the product, those that keep lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from deadweight.claims.head_parts import HeadPart
from deadweight.proof import field
from deadweight.proof.normed_heads import Gram


def keeping_lengths(parts: Sequence[HeadPart], norms: Sequence[Gram]) -> list[HeadPart]:
    """The parts, each with the directions that keep every norm; a part of which none is known to is left out."""
    return [kept for part in parts if (kept := restricted(part, norms)) is not None]


def restricted(part: HeadPart, norms: Sequence[Gram]) -> HeadPart | None:
    sides = [(head.reshape(-1), "left_entries") for head in part.queries] + [(part.right, "right_entries")]
    conditions: list[tuple[Tensor, str]] = []
    for coordinates, entries in sides:
        for norm in norms:
            inside = torch.isin(coordinates, norm.coordinates)
            if not bool(inside.any()):
                continue
            own = norm.on(coordinates) if bool(inside.all()) else None
            if own is None:
                return None
            conditions.append((own, entries))
    if not conditions:
        return part
    plain = all(is_identity(basis) for basis in (part.part.left_basis, part.part.right_basis))
    allowed = None
    if plain and part.part.count == 1:
        allowed = of_one_component(part, conditions)
    elif plain and part.part.entry == part.keys.shape[-1] == 1:
        allowed = antisymmetric(part.part.count) if all(is_scalar(g) for g, _ in conditions) else None
    return None if allowed is None or not len(allowed) else replace(part, allowed=allowed)


def is_identity(basis: Tensor) -> bool:
    return torch.equal(basis, torch.eye(basis.shape[-1], dtype=torch.float64).expand_as(basis))


def is_scalar(gram: Tensor) -> bool:
    """Whether every G is a number times the identity."""
    number = gram[:, :1, :1]
    return torch.equal(gram, number * torch.eye(gram.shape[-1], dtype=torch.int64))


def antisymmetric(count: int) -> Tensor:
    rows, columns = torch.triu_indices(count, count, 1)
    result = torch.zeros(len(rows), count, count, 1, dtype=torch.float64)
    result[torch.arange(len(rows)), rows, columns] = 1.0
    result[torch.arange(len(rows)), columns, rows] = -1.0
    return result


def of_one_component(part: HeadPart, conditions: list[tuple[Tensor, str]]) -> Tensor | None:
    """Combinations z of the entries E with G·E(z) antisymmetric for all G; the entries are whole numbers."""
    rows: list[Tensor] = []
    for gram, name in conditions:
        entries = getattr(part.part, name)
        if not bool((entries == entries.round()).all()):
            return None
        numbers = torch.remainder(entries.to(torch.int64), field.P)  # (n, d, d): beside each other in one product
        beside = numbers.movedim(0, 1).flatten(1).contiguous()
        products = field.matmul(gram.unique(dim=0), beside)  # most positions have the same
        products = products.unflatten(2, numbers.shape[::2]).transpose(1, 2)  # (grams, n, d, d)
        rows.extend(field.plus(products, products.mT).flatten(2).mT)
    real = field.as_real(field.null_space(torch.cat(rows).contiguous()))
    return None if real is None else real.reshape(-1, 1, 1, part.part.entry)


def directions(part: HeadPart) -> Iterator[Tensor]:
    """A basis of the part's directions, as coefficients (count, count, entry)."""
    count, entry = part.part.count, part.part.entry
    if part.allowed is not None:
        yield from part.allowed
        return
    yield from torch.eye(count * count * entry, dtype=torch.float64).reshape(-1, count, count, entry)
