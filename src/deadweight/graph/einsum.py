"""einsum spelled out as products, so that the rules see which axes are contracted."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def spelled_out_einsum(equation: str, operands: list[Tensor], *, path: list[int] | None = None) -> Tensor:
    """Two operands at a time, from the left; what is more than permuting, multiplying and contracting stays torch's."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow or not plain(terms, output):
        return aten.einsum.default.decompose(equation, operands, path=path)
    result, letters = operands[0], terms[0]
    for place, (other, term) in enumerate(zip(operands[1:], terms[1:], strict=True), 2):
        later = "".join(terms[place:]) + output
        kept = "".join(dict.fromkeys(c for c in letters + term if c in later))
        result, letters = contracted(result, letters, other, term, kept), kept
    return permuted(result, letters, output)


def plain(terms: list[str], output: str) -> bool:
    """No ellipsis, no diagonal, and every letter that is summed over stands in two operands at least."""
    letters = [*terms, output]
    once = all(term.isalpha() and len(set(term)) == len(term) for term in letters)
    shared = all(c in output or sum(c in term for term in terms) > 1 for term in terms for c in term)
    return once and shared and len(terms) > 1


def contracted(a: Tensor, left: str, b: Tensor, right: str, kept: str) -> Tensor:
    """Σ a·b over the letters that are not kept, with axes in the order of `kept`."""
    if a.dim() < b.dim() and a.dim() == 2:
        a, left, b, right = b, right, a, left  # a weight stands on the right
    batch = "".join(c for c in kept if c in left and c in right)
    summed = "".join(c for c in left if c in right and c not in kept)
    own, others = ("".join(c for c in kept if c in x and c not in y) for x, y in ((left, right), (right, left)))
    sizes = {**dict(zip(left, a.shape, strict=True)), **dict(zip(right, b.shape, strict=True))}
    if not summed:
        shape = [sizes[c] if c not in others else 1 for c in batch + own + others]
        product = permuted(a, left, batch + own).reshape(shape) * joined(
            permuted(b, right, batch + others), [sizes[c] if c not in own else 1 for c in batch + own + others]
        )
        return permuted(product, batch + own + others, kept)
    a, b = permuted(a, left, batch + own + summed), permuted(b, right, batch + summed + others)
    lead = [sizes[c] for c in batch]
    flat = [*lead, *([prod(sizes[c] for c in own)] if batch else [sizes[c] for c in own] or [1])]
    a = joined(a, [*flat, prod(sizes[c] for c in summed)])
    b = joined(b, [*lead, prod(sizes[c] for c in summed), prod(sizes[c] for c in others)])
    product = joined(torch.matmul(a, b), [sizes[c] for c in batch + own + others])
    return permuted(product, batch + own + others, kept)


def permuted(x: Tensor, letters: str, wanted: str) -> Tensor:
    return x if letters == wanted else x.permute([letters.index(c) for c in wanted])


def joined(x: Tensor, shape: list[Any]) -> Tensor:
    return x if list(x.shape) == shape else x.reshape(shape)
