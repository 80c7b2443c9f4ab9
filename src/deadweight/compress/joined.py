"""Keys of several heads as one: at every rotary frequency a few complex numbers that all these heads share.

A plane of a head is a complex number, and a position multiplies it by e^{iθt}. At one frequency the keys of m heads are
a vector k in C^m, and any complex matrix commutes with the position. So r ≤ m numbers D k may be stored, D in C^{r×m},
and a query head with the number q, which met k_j, meets u·Dk in place of it, with a row u of its own: the score is
Re(q̄ u D k), that is, the query becomes ū q. A real matrix that is not complex-linear would not do: it does not commute
with the rotation. What is lost depends on the sum over all frequencies of Re(x z), where x = uD − e_j, and
z = q̄ c, with c the gradient with respect to the query, had it met the keys of all heads: ½ xᵀFx, F the moment of all z.

D is unitary at every frequency. Its first rows span what the leading left singular vectors of A^½ C^½, times A^½, do,
with C the moment of z without the query's size and A the sizes summed over the query heads of every key head: the best
ones where F is such a product (Eckart and Young). Which of the m numbers of which frequency goes next, and how all u
make up for it, is the optimal brain surgeon's formula, as for planes of single heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deadweight.compress.subspace import JITTER

SPARSE = 0.75  # of the numbers in a matrix: with fewer left, it is made smaller
DAMPING = 1e-3  # of the mean variance: large corrections are outside what second order can promise


@dataclass(frozen=True)
class Joined:
    """Numbers are counted plane by plane: number p·m + i is the i-th of plane p."""

    order: tuple[int, ...]  # `order[n:]` are the numbers that remain when n are dropped
    loss: Tensor  # by how many are kept
    mix: Tensor  # P m m, complex: D
    damped: Tensor  # h 2Pm 2Pm: F as D sees it, real and imaginary parts
    target: Tensor  # h 2Pm: what u·D − e_j is, as D sees it, where a number is dropped

    def kept(self, count: int) -> tuple[int, ...]:
        return tuple(sorted(self.order[len(self.order) - count :]))

    def reads(self, count: int) -> Tensor:
        """u for every query head and kept number, (h, kept), complex: the best for what is kept."""
        size = len(self.order)
        kept = torch.tensor(self.kept(count), dtype=torch.long)
        gone = torch.tensor(sorted(self.order[: size - count]), dtype=torch.long)
        free, fixed = (torch.cat([at, at + size]) for at in (kept, gone))
        change = torch.zeros_like(self.target)[:, free]
        if len(gone) and count:
            right = self.damped[:, free[:, None], fixed] @ self.target[:, fixed, None]
            factor = torch.linalg.cholesky(self.damped[:, free[:, None], free])
            change = -torch.cholesky_solve(right, factor).squeeze(-1)
        return torch.complex(*(change - self.target[:, free]).unflatten(1, (2, -1)).unbind(1))


def answers(query: Tensor, gradient: Tensor, planes: tuple[tuple[int, int], ...], joined: int) -> Tensor:
    """z of every token: (b, h, t, d) and (b, h, t, m·d) → (b, h, t, 2Pm), Re z beside −Im z, so that Re(xz) = x·z."""
    c = torch.stack([as_complex(part, planes) for part in gradient.unflatten(-1, (joined, -1)).unbind(-2)], -1)
    z = as_complex(query, planes)[..., None].conj() * c  # b h t P m
    return torch.cat([z.real.flatten(-2), -z.imag.flatten(-2)], -1)


def as_complex(states: Tensor, planes: tuple[tuple[int, int], ...]) -> Tensor:
    """The planes of (…, d) as complex numbers, (…, P)."""
    first, second = (torch.tensor(side, dtype=torch.long, device=states.device) for side in zip(*planes, strict=True))
    return torch.complex(states.index_select(-1, first), states.index_select(-1, second))


def moment_of_product(sizes: Tensor, keys: Tensor) -> Tensor:
    """F if gradients were like any keys, whatever the query: E|q|² (h, P) times E kkᴴ (h, P, m, m), planes apart."""
    heads, count, joined = keys.shape[:3]
    blocks = 0.5 * sizes[..., None, None] * keys
    found = torch.zeros(heads, 2, count, joined, 2, count, joined, dtype=torch.float64)
    for p in range(count):
        found[:, 0, p, :, 0, p] = found[:, 1, p, :, 1, p] = blocks[:, p].real
        found[:, 0, p, :, 1, p], found[:, 1, p, :, 0, p] = blocks[:, p].imag, -blocks[:, p].imag
    return found.view(heads, 2 * count * joined, -1)


def best_joined(moment: Tensor, members: Tensor, joined: int, measured: Tensor | None = None) -> Joined:
    """`moment` is F, (h, 2Pm, 2Pm); `members` says with which of the m key heads each query head meets its own key.

    If F is not what was measured, but steadied, losses are still predicted by what was.
    """
    size = moment.shape[-1] // 2
    mix = best_mix(moment, members, joined)
    seen, weighed = (real_form(mix) @ f @ real_form(mix).T for f in (moment, moment if measured is None else measured))
    scale = seen.diagonal(dim1=-2, dim2=-1).mean().clamp(min=1e-30)
    damped = seen + DAMPING * scale * torch.eye(2 * size, dtype=moment.dtype)
    own = -mix.mH[:, members].transpose(0, 1).flatten(1)  # −e_j D⁻¹ for every head: h Pm
    target = torch.cat([own.real, own.imag], 1)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    order, ways = dropping_order(inverse, target)
    loss = 0.5 * ((ways.transpose(0, 1) @ weighed) * ways.transpose(0, 1)).sum((0, 2))
    return Joined(order, loss.flip(0), mix, damped, target)


def dropping_order(inverse: Tensor, target: Tensor) -> tuple[tuple[int, ...], Tensor]:
    """Which number goes next, and what x = uD − e_j is when none, one, two … have gone: (Pm + 1, h, 2Pm).

    `inverse` is that of the damped moment, and is used up: a number that is gone leaves it.
    """
    size = target.shape[1] // 2
    there, left = torch.arange(size), list(range(size))  # numbers in `inverse`; places of those that are not yet gone
    x, wanted = torch.zeros_like(target), target
    order, ways = list[int](), [x.clone()]
    whole = x.clone()
    while left:
        if len(left) <= SPARSE * len(there):
            places = torch.tensor(left)
            both = torch.cat([places, places + len(there)])
            inverse = inverse[:, both[:, None], both]
            x, wanted, there = x[:, both], wanted[:, both], there[places]
            left = list(range(len(left)))
        count = len(there)
        pairs = torch.tensor(left)[:, None] + torch.tensor([0, count])
        error = wanted[:, pairs] - x[:, pairs]
        block = two_by_two(inverse[:, pairs[:, :, None], pairs[:, None, :]])
        best = int((error * (block @ error[..., None])[..., 0]).sum((0, 2)).argmin())
        pair = pairs[best]
        into = block[:, best] @ inverse[:, pair]  # h 2 2·count
        x = x + (error[:, best, None, :] @ into)[:, 0]
        inverse.baddbmm_(inverse[:, :, pair], into, alpha=-1)
        inverse[:, pair], inverse[:, :, pair] = 0.0, 0.0
        inverse[:, pair[:, None], pair] = torch.eye(2, dtype=inverse.dtype)  # out of the way, and never singular
        x[:, pair] = wanted[:, pair]
        order.append(int(there[left.pop(best)]))
        whole[:, torch.cat([there, there + size])] = x
        ways.append(whole.clone())
    return tuple(order), torch.stack(ways)


def best_mix(moment: Tensor, members: Tensor, joined: int) -> Tensor:
    """D at every frequency, (P, m, m), unitary, the rows that matter most first."""
    parts = moment.unflatten(2, (2, -1, joined)).unflatten(1, (2, -1, joined)).diagonal(dim1=2, dim2=5)  # h 2 m 2 m P
    own = torch.complex(parts[:, 0, :, 0] + parts[:, 1, :, 1], parts[:, 0, :, 1] - parts[:, 1, :, 0])
    own = own.movedim(-1, 1)  # h P m m: E zzᴴ
    sizes = own.diagonal(dim1=-2, dim2=-1).real.mean(-1).clamp(min=1e-300)  # h P
    eye = torch.eye(joined, dtype=own.dtype)
    keys = (own / sizes[..., None, None]).mean(0) + JITTER * eye
    weight = torch.zeros(sizes.shape[1], joined, dtype=sizes.dtype).index_add_(1, members, sizes.T.contiguous())
    weight = weight / weight.mean(1, keepdim=True) + JITTER
    values, vectors = torch.linalg.eigh(keys)
    whole = (vectors * values.clamp(min=0).sqrt()[:, None, :]) @ vectors.mH
    left = torch.linalg.svd(weight.sqrt()[..., None] * whole)[0]
    rows = left * weight.sqrt()[..., None]  # columns: conjugated rows of D, not yet orthogonal
    return torch.linalg.qr(rows)[0].mH


def real_form(mix: Tensor) -> Tensor:
    """The real matrix by which Re z beside −Im z goes over into the same of Dz."""
    real, imaginary = torch.block_diag(*mix.real), torch.block_diag(*mix.imag)
    return torch.cat([torch.cat([real, imaginary], 1), torch.cat([-imaginary, real], 1)])


def two_by_two(matrix: Tensor) -> Tensor:
    """The inverses of many small matrices."""
    a, b, c, d = (matrix[..., i, j] for i in range(2) for j in range(2))
    found = torch.stack([d, -b, -c, a], -1) / (a * d - b * c)[..., None]
    return found.unflatten(-1, (2, 2))
