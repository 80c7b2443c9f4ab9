"""Second moments of what passes through every head, and of the gradient with respect to it.

Let z be a vector that a head passes on and ∂z the gradient of the loss with respect to it. Replacing z by z + δ changes
the loss, to second order and with labels drawn from the model's own predictions (so that the first order vanishes and
the loss is the KL divergence from the original), by ½ E(∂z·δ)². With δ linear in z, the moments below are all that is
needed to predict any truncation.

Key heads may be merged: their values then lie side by side, and a query head is seen to gather all of them, of which it
uses its own. Nothing changes, but a few dimensions shared by all may say what each head would need many for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from deadweight.errors import DeadweightError
from deadweight.heads.judge import called
from deadweight.heads.locate import Heads
from deadweight.heads.observe import Attend, observing


def second(x: Tensor) -> Tensor:
    """Σ x xᵀ over rows and tokens for every head, in float64: (b, h, t, d) → (h, d, d)."""
    flat = x.transpose(0, 1).flatten(1, 2)
    return (flat.transpose(1, 2) @ flat).double().cpu()


class Moments:
    """All that is measured of one attention: sums over tokens, of which `mean` makes averages."""

    def __init__(self, heads: Heads, merged: int) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64)

        self.heads, self.merged, self.tokens = heads, merged, 0
        h, v, s = heads.heads, merged * heads.d_v, len(heads.still)
        n = heads.groups * 2 * len(heads.planes)
        self.out, self.out_mean = zeros(h, v, v), zeros(h, v)  # what a query head gathers of all merged values
        self.out_gradient = zeros(h, heads.d_v, heads.d_v)  # with respect to its own
        self.query, self.query_gradient = zeros(h, s, s), zeros(h, s, s)  # still places
        self.planes = zeros(heads.key_heads, n, n)  # how the loss answers to stretching and turning each plane

    def add(self, query: Tensor, out: Tensor, dq: Tensor | None, dout: Tensor | None) -> None:
        query, out = query.detach().float(), out.detach().float()
        dq = torch.zeros_like(query) if dq is None else dq.float()
        dout = torch.zeros_like(out) if dout is None else dout.float()
        if not all(bool(torch.isfinite(t).all()) for t in (query, out, dq, dout)):
            raise DeadweightError(
                f"{self.heads.path} has activations or gradients that are not finite on the calibration inputs; "
                "expected a model that works: nothing can be measured on this one"
            )
        self.tokens += out.shape[0] * out.shape[2]
        self.out += second(out)
        self.out_mean += out.sum((0, 2)).double().cpu()
        self.out_gradient += second(own_values(dout, self.heads, self.merged))
        still = torch.tensor(self.heads.still, dtype=torch.long, device=query.device)
        self.query += second(query[..., still])
        self.query_gradient += second(dq[..., still])
        if self.heads.planes:
            self.planes += second(along_and_across(query, dq, self.heads))

    def mean(self) -> Moments:
        if self.tokens == 0:
            raise DeadweightError(
                f"{self.heads.path} was not reached by the calibration inputs; expected all heads to be used"
            )
        found = Moments(self.heads, self.merged)
        found.tokens = self.tokens
        for name in ("out", "out_mean", "out_gradient", "query", "query_gradient", "planes"):
            setattr(found, name, getattr(self, name) / self.tokens)
        return found


def merged_values(value: Tensor, merged: int) -> Tensor:
    """(b, g, t, d) as (b, g, t, merged·d): every key head with the values of all heads that it is merged with."""
    beside = value.unflatten(1, (-1, merged)).transpose(2, 3).flatten(3)
    return beside.repeat_interleave(merged, 1)


def own_values(out: Tensor, heads: Heads, merged: int) -> Tensor:
    """Of what each query head gathers, (b, h, t, merged·d), the part that is its own."""
    parts = out.unflatten(-1, (merged, heads.d_v))
    member = torch.arange(heads.heads, device=out.device) // heads.groups % merged
    return parts[:, torch.arange(heads.heads, device=out.device), :, member].transpose(0, 1)


def along_and_across(q: Tensor, gradient: Tensor, heads: Heads) -> Tensor:
    """For each token and key head, how the loss answers to stretching and to turning each plane of each query head.

    Stretching plane (i, j) by 1 + a and turning it by the angle b changes q by a·q + b·Jq. The result is
    (b, g, t, groups·2·P).
    """
    i, j = (torch.tensor(side, device=q.device) for side in zip(*heads.planes, strict=True))
    along = q[..., i] * gradient[..., i] + q[..., j] * gradient[..., j]
    across = q[..., i] * gradient[..., j] - q[..., j] * gradient[..., i]
    both = torch.cat([along, across], -1)  # b h t 2P
    return both.unflatten(1, (heads.key_heads, heads.groups)).transpose(2, 3).flatten(3)


class Recorder:
    """Keeps what every attention is given and puts out in one run, so that gradients can be asked for."""

    def __init__(self, known: dict[str, Moments]) -> None:
        self.known = known
        self.kept: list[tuple[str, Tensor, Tensor]] = []

    def __call__(
        self, path: str, query: Tensor, key: Tensor, value: Tensor, attend: Attend, how: dict[str, Any]
    ) -> Tensor:
        moments = self.known[path]
        if not query.requires_grad:
            query = query.detach().requires_grad_()
        out = attend(query, key, merged_values(value, moments.merged))
        self.kept.append((path, query, out))
        return own_values(out, moments.heads, moments.merged)


def measure(
    model: Any,
    found: dict[str, Moments],
    batches: Sequence[dict[str, Tensor]],
    *,
    seed: int = 0,
    tick: Callable[[int], None] = lambda _: None,
) -> dict[str, Moments]:
    """The moments of every attention over all batches, by its path; `found` holds empty ones."""
    generator = torch.Generator().manual_seed(seed)
    frozen = [p for p in model.parameters() if p.requires_grad]
    for p in frozen:
        p.requires_grad_(False)
    try:
        for number, batch in enumerate(batches):
            recorder = Recorder(found)
            with observing(model, recorder), torch.enable_grad():
                loss = probe(called(model, batch), generator)
                wanted = [t for _, query, out in recorder.kept for t in (query, out)]
                gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
            for n, (path, query, out) in enumerate(recorder.kept):
                found[path].add(query, out, gradients[2 * n], gradients[2 * n + 1])
            tick(number + 1)
    finally:
        for p in frozen:
            p.requires_grad_(True)
    return {path: moments.mean() for path, moments in found.items()}


def probe(output: Any, generator: torch.Generator) -> Tensor:
    """A scalar whose gradient's second moment is that of the divergence from the original.

    For logits: minus the log-probability of labels drawn from them. For other outputs: a random projection, scaled so
    that the squared gradient is the relative squared error.
    """
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        flat = logits.flatten(0, -2).float()
        if not bool(torch.isfinite(flat).all()):
            raise DeadweightError(
                "the model gives logits that are not finite on the calibration inputs; expected a model that works"
            )
        with torch.no_grad():
            labels = torch.multinomial(flat.softmax(-1).cpu(), 1, generator=generator).squeeze(1)
        return F.cross_entropy(flat, labels.to(flat.device), reduction="sum")
    states = output.last_hidden_state.float()
    scale = states.detach().pow(2).sum(-1, keepdim=True).clamp(min=1e-12).sqrt()
    noise = torch.randn(states.shape, generator=generator).to(states.device)
    return (states * noise / scale).sum()
