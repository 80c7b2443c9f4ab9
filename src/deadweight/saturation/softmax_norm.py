"""The spectral norm of the softmax Jacobian J = diag(p) − p pᵀ, exactly, without an eigendecomposition.

Let p ≥ 0 with Σp = 1, sorted: p₁ ≥ p₂ ≥ … ≥ pₙ, and r = Σ_{i≥2} pᵢ = 1 − p₁.

**J is a graph Laplacian**: xᵀJx = ½ Σᵢⱼ pᵢpⱼ(xᵢ − xⱼ)². So J ⪰ 0 and its norm is its largest eigenvalue λ. Changing
every pᵢ by a factor 1 + O(ε) changes this form, and so λ, by a factor 1 + O(ε): all digits of λ are determined by those
of p, however small λ is.

**Where λ lies.** e₁ᵀJe₁ = p₁r ≤ λ, and by Gershgorin λ ≤ 2·maxᵢ pᵢ(1 − pᵢ) = 2p₁r (if p₁ > ½ then p₂ ≤ 1 − p₁ < ½). So
p₁r ≤ λ ≤ 2p₁r ≤ ½, with λ = ½ for p = (½, ½, 0, …) at any length. J is diag(p) less a matrix of rank one, so by
interlacing p₂ ≤ λ ≤ p₁, and the second eigenvalue is at most p₂.

**Which equation it solves.** If p₁ = p₂, then λ = p₁ (take e₁ − e₂). If p₂ = 0, then J = 0. Otherwise, off the pᵢ,
det(J − λ) = Π(pᵢ − λ) · (1 − Σ pᵢ²/(pᵢ − λ)), and since pᵢ²/(pᵢ − λ) = pᵢ + λpᵢ/(pᵢ − λ) and Σp = 1, λ ≠ 0 is an
eigenvalue where Σ pᵢ/(pᵢ − λ) = 0. This sum grows from −∞ to ∞ between p₂ and p₁: it has one zero there, which is λ.

**How it is solved.** With S(λ) = Σ_{i≥2} pᵢ/(λ − pᵢ), the equation is G(λ) = 1/S(λ) − (p₁ − λ)/p₁ = 0. 1/S is a
harmonic sum of the affine functions (λ − pᵢ)/pᵢ, positive for λ > p₂: such a sum is concave and increasing, hence so is
G, which has no poles. A tangent of a concave function lies above it, so Newton's method is never right of the zero
after its first step, and goes up to it, quadratically. It starts at p₁r or at 2p₁p₂/(p₁ + p₂) (what S ≥ p₂/(λ − p₂)
gives), whichever is larger: within a factor of two of λ. All is computed in units of p₂, from λ − p₂, so that nothing
cancels.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

STEPS = 60  # four to eight are enough for rows of trained models
ROUNDING = 4 * torch.finfo(torch.float64).eps


def softmax_norm(p: Float[Tensor, "*rows n"]) -> Float[Tensor, "*rows"]:
    """‖diag(p) − p pᵀ‖₂ of every row of probabilities, in float64; a hidden key is a zero."""
    p = p.double()
    if p.shape[-1] < 2:
        return torch.zeros(p.shape[:-1], dtype=p.dtype, device=p.device)
    top = p.topk(2)
    (first, second), largest = top.values.unbind(-1), top.indices[..., :1]
    plain = (second == 0) | (first == second)  # the answer is p₂
    unit = torch.where(second == 0, torch.ones_like(second), second)
    weight = (p / unit[..., None]).scatter(-1, largest, 0.0)  # pᵢ/p₂ for i ≥ 2
    gap = (1 - weight).clamp(min=0.0)
    ratio, apart = unit / first, (first - second) / first
    above = torch.maximum(apart / (1 + ratio), first * weight.sum(-1) - 1)  # (λ − p₂)/p₂
    above = torch.where(plain, torch.ones_like(above), above)
    for _ in range(STEPS):
        share = weight / (above[..., None] + gap)
        total = share.sum(-1)
        slope = (share / (above[..., None] + gap)).sum(-1) / total.square() + ratio
        step = torch.where(plain, 0.0, (apart - ratio * above - 1 / total) / slope)
        above = above + step
        if bool((step.abs() <= ROUNDING * (1 + above)).all()):
            break
    return torch.where(plain, second, second * (1 + above)).clamp(max=0.5)
