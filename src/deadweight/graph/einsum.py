"""einsum spelled out as products, so that the rules see which axes are contracted."""

from __future__ import annotations

from collections import Counter
from math import prod
from string import ascii_letters

import torch
from torch import Tensor


def spell_out_einsum(equation: str, operands: list[Tensor], *, path: list[int] | None = None) -> Tensor:
    """Two operands at a time, from the left: the order never changes the function, only the cost.

    An operand without axes of its own (the weight of each expert, say) comes first: it is a plain factor, and the axes
    that it shares can be summed with the next operand.
    """
    terms, output = parse(equation, [x.dim() for x in operands])
    operands, terms = map(list, zip(*map(without_diagonals, operands, terms), strict=True))
    sizes: dict[str, int] = {}
    for x, term in zip(operands, terms, strict=True):
        for letter, size in zip(term, x.shape, strict=True):
            sizes[letter] = size if sizes.get(letter, 1) == 1 else sizes[letter]
    operands = [
        reshape_or_expand(x, [sizes[c] for c in term], expand=True) for x, term in zip(operands, terms, strict=True)
    ]

    result, letters = operands[0], terms[0]
    rest = list(zip(operands[1:], terms[1:], strict=True))
    while rest:
        place = next((i for i, (_, term) in enumerate(rest) if set(term) <= set(letters)), 0)
        other, term = rest.pop(place)
        later = "".join(t for _, t in rest) + output
        result, letters = sum_unread(result, letters, keep=term + later)
        other, term = sum_unread(other, term, keep=letters + later)
        kept = "".join(dict.fromkeys(c for c in letters + term if c in later))
        result, letters = contract(result, letters, other, term, kept), kept
    result, letters = sum_unread(result, letters, keep=output)
    return permute(result, letters, output)


def parse(equation: str, dims: list[int]) -> tuple[list[str], str]:
    """The letters of every operand and of the result; the axes of an ellipsis get letters of their own."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    free = [c for c in ascii_letters if c not in equation]
    hidden = max((dim - len(t) + 3 for dim, t in zip(dims, terms, strict=True) if "..." in t), default=0)
    dots = "".join(free[:hidden])
    named = [
        t.replace("...", dots[hidden - (dim - len(t) + 3) :] if "..." in t else "")
        for dim, t in zip(dims, terms, strict=True)
    ]
    if not arrow:
        count = Counter("".join(terms).replace(".", ""))
        return named, dots + "".join(sorted(c for c, times in count.items() if times == 1))
    return named, output.replace("...", dots)


def without_diagonals(x: Tensor, term: str) -> tuple[Tensor, str]:
    for letter in dict.fromkeys(term):
        while term.count(letter) > 1:
            first = term.index(letter)
            second = term.index(letter, first + 1)
            x = torch.diagonal(x, dim1=first, dim2=second)
            term = term[:first] + term[first + 1 : second] + term[second + 1 :] + letter
    return x, term


def sum_unread(x: Tensor, letters: str, *, keep: str) -> tuple[Tensor, str]:
    """x summed over the letters that are not in `keep`."""
    gone = [axis for axis, c in enumerate(letters) if c not in keep]
    return (x.sum(gone), "".join(c for c in letters if c in keep)) if gone else (x, letters)


def contract(a: Tensor, left: str, b: Tensor, right: str, kept: str) -> Tensor:
    """Σ a·b over the letters that are not kept, with axes in the order of `kept`."""
    if a.dim() < b.dim() and a.dim() == 2:
        a, left, b, right = b, right, a, left  # the weight is the right operand
    batch = "".join(c for c in kept if c in left and c in right)
    over = "".join(c for c in left if c in right and c not in kept)
    own, others = ("".join(c for c in kept if c in x and c not in y) for x, y in ((left, right), (right, left)))
    sizes = {**dict(zip(left, a.shape, strict=True)), **dict(zip(right, b.shape, strict=True))}
    if not over:
        shape = [sizes[c] if c not in others else 1 for c in batch + own + others]
        product = permute(a, left, batch + own).reshape(shape) * reshape_or_expand(
            permute(b, right, batch + others), [sizes[c] if c not in own else 1 for c in batch + own + others]
        )
        return permute(product, batch + own + others, kept)
    a, b = permute(a, left, batch + own + over), permute(b, right, batch + over + others)
    lead = [sizes[c] for c in batch]
    flat = [*lead, *([prod(sizes[c] for c in own)] if batch else [sizes[c] for c in own] or [1])]
    a = reshape_or_expand(a, [*flat, prod(sizes[c] for c in over)])
    b = reshape_or_expand(b, [*lead, prod(sizes[c] for c in over), prod(sizes[c] for c in others)])
    product = reshape_or_expand(torch.matmul(a, b), [sizes[c] for c in batch + own + others])
    return permute(product, batch + own + others, kept)


def permute(x: Tensor, letters: str, wanted: str) -> Tensor:
    return x if letters == wanted else x.permute([letters.index(c) for c in wanted])


def reshape_or_expand(x: Tensor, shape: list[int], *, expand: bool = False) -> Tensor:
    if list(x.shape) == shape:
        return x
    return x.expand(shape) if expand else x.reshape(shape)
