"""Other ways to make heads smaller, each as its paper says, in the terms of deadweight's own machinery.

Those that keep some dimensions of every head are given as `Spaces` and cut by the same code as ours. None of them is
given what is ours alone: means go into no bias, planes that stay are not stretched, and heads share nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deadweight.compress.budget import attention_weights, total_cost, weights_per_place, whole
from deadweight.compress.locate import Heads, Rows
from deadweight.compress.moments import probe, second
from deadweight.compress.observe import Attend, observing
from deadweight.compress.planes import Planes
from deadweight.compress.subspace import Subspace, best_subspace, jittered
from deadweight.compress.truncate import Kept, LinearMap, Spaces, cut

Kepts = dict[str, Kept]


@dataclass(frozen=True)
class Made:
    """A smaller model, and the share of the budgeted quantity that it keeps."""

    module: nn.Module
    share: float


# What is measured


@dataclass
class Statistics:
    """Second moments over the calibration text: of the inputs of layers, and of what every attention is given."""

    inputs: dict[str, Tensor]  # by layer, d_in × d_in
    query: dict[str, Tensor]  # by attention, h × d × d, after rotary positions
    key: dict[str, Tensor]
    out: dict[str, Tensor]


def statistics(model: Any, attentions: Sequence[Heads], batches: Sequence[dict[str, Tensor]]) -> Statistics:
    found = Statistics({}, {}, {}, {})
    layers = {p for h in attentions for p in (*(r.module for r in sides(h)), *([h.output] if h.output else []))}

    def observer(path: str, q: Tensor, k: Tensor, v: Tensor, attend: Attend, how: dict[str, Any]) -> Tensor:
        out = attend(q, k, v)
        for known, states in ((found.query, q), (found.key, k), (found.out, out)):
            known[path] = known.get(path, 0.0) + second(states)
        return out

    def seen(name: str, x: Tensor) -> None:
        flat = x.detach().flatten(0, -2)
        found.inputs[name] = found.inputs.get(name, 0.0) + (flat.T @ flat).double().cpu()

    modules = [(name, model.get_submodule(name)) for name in sorted(layers)]
    hooks = [m.register_forward_pre_hook(lambda m, a, name=name: seen(name, a[0])) for name, m in modules]
    try:
        with torch.no_grad(), observing(model, observer):
            for batch in batches:
                model(**batch)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def importance(model: Any, attentions: Sequence[Heads], batches: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """How much the loss answers to each key head: E_x |Σ_h out_h(x)·∂L/∂out_h(x)|, normalised in every layer.

    Michel, Levy and Neubig, Are Sixteen Heads Really Better than One?, 2019 (arXiv 1905.10650): the
    gradient with respect to a mask on the head, its absolute value for every example x, and the ℓ2 norm of each layer
    made one. A key head is masked together with all query heads that share it. L is the loss of the next token; for a
    model without one, a random projection of its output.
    """
    groups = {h.path: h.groups for h in attentions}
    found = {h.path: torch.zeros(h.key_heads, dtype=torch.float64) for h in attentions}
    generator = torch.Generator().manual_seed(0)
    frozen = [p for p in model.parameters() if p.requires_grad]
    for p in frozen:
        p.requires_grad_(False)
    try:
        for batch in batches:
            kept: list[tuple[str, Tensor]] = []

            def observer(path: str, q: Tensor, k: Tensor, v: Tensor, attend: Attend, how: Any, kept: Any = kept) -> Any:
                out = attend(q, k, v)
                kept.append((path, out if out.requires_grad else out.detach().requires_grad_()))
                return kept[-1][1]

            with observing(model, observer), torch.enable_grad():
                gradients = torch.autograd.grad(task_loss(model, batch, generator), [out for _, out in kept])
            for (path, out), gradient in zip(kept, gradients, strict=True):
                answer = (out.detach() * gradient).sum((2, 3)).double().cpu()  # b × h
                found[path] += answer.unflatten(1, (-1, groups[path])).sum(2).abs().sum(0)
    finally:
        for p in frozen:
            p.requires_grad_(True)
    return {path: x / x.norm().clamp(min=1e-300) for path, x in found.items()}


def task_loss(model: Any, batch: dict[str, Tensor], generator: torch.Generator) -> Tensor:
    if hasattr(model, "generate"):
        return model(**batch, labels=batch["input_ids"]).loss
    return probe(model(**batch), generator)


# Dimensions of every head


def sides(heads: Heads) -> list[Rows]:
    return [side for side in (heads.query, heads.key, heads.value) if side is not None]


def weights(model: nn.Module, rows: Rows) -> Tensor:
    """The rows of every head as attention sees them, (heads, size, inputs)."""
    return LinearMap(model, rows.module).weight[rows.places] * rows.factor.double()[..., None]


def output_weights(model: nn.Module, heads: Heads) -> Tensor:
    """The columns that read every query head, (heads, outputs, size)."""
    assert heads.output is not None
    return LinearMap(model, heads.output).weight.unflatten(1, (heads.heads, heads.d_v)).transpose(0, 1)


def grams(weight: Tensor) -> Tensor:
    return weight @ weight.transpose(1, 2)


def in_groups(heads: Heads, per_query_head: Tensor) -> Tensor:
    return per_query_head.unflatten(0, (heads.key_heads, heads.groups))


def spaces_of(heads: Heads, values: Sequence[Subspace], still: Sequence[Subspace], planes: Sequence[Tensor]) -> Spaces:
    """Nothing stretched, no means: the bases and the planes' importances say it all."""
    none = (None,) * heads.key_heads
    return Spaces(
        heads,
        1,
        1,
        torch.zeros(heads.heads, heads.d_v, dtype=torch.float64),
        tuple(values),
        tuple(still) if heads.still else none,
        tuple(by_importance(p, heads.groups) for p in planes) if heads.planes else none,
    )


def by_importance(worth: Tensor, groups: int) -> Planes:
    count = len(worth)
    lost = torch.cat([worth.new_zeros(1), worth.sort().values.cumsum(0)]).flip(0)
    return Planes(tuple(worth.argsort().tolist()), lost, worth.new_zeros(count + 1, groups, 2, count))


def coordinates(worth: Tensor) -> Subspace:
    """The places themselves, the worthiest first."""
    eye = torch.eye(len(worth), dtype=worth.dtype)
    order = worth.argsort(descending=True)
    lost = torch.cat([worth.sum()[None], worth.sum() - worth[order].cumsum(0)])
    return Subspace(eye[order], lost, eye[None].expand(1, -1, -1))


def repeated(space: Subspace, groups: int) -> Subspace:
    return Subspace(space.basis, space.loss, space.moment.expand(groups, -1, -1))


def plane_norms(model: nn.Module, heads: Heads) -> list[Tensor]:
    """‖W_Q‖·‖W_K‖ of every plane, for every key head over all query heads that meet it."""
    assert heads.query is not None and heads.key is not None
    q = in_groups(heads, weights(model, heads.query).pow(2).sum(2)).sum(1)
    return plane_products(heads, q, weights(model, heads.key).pow(2).sum(2))


def plane_products(heads: Heads, q: Tensor, k: Tensor) -> list[Tensor]:
    """Root of the product of both sides' squared sizes, (key heads, places) each, in every plane."""
    at = torch.tensor(heads.planes, dtype=torch.long).view(-1, 2)
    return list((q[:, at].sum(2) * k[:, at].sum(2)).sqrt())


def plain(model: nn.Module, heads: Heads) -> Spaces:
    """Truncated singular values of W_V W_O, and of W_Q W_K where no positions stand between them, head by head.

    Meng, Tang, Jiang and Zhang, CLOVER: Cross-LinearMap Orthogonal Vectors Pruning and Fine-Tuning, ICML 2025 (arXiv
    2411.17426). Query heads that share a key head are one stacked pair. The paper's pruning is for queries and keys
    without rotary positions; with them the pair is no product of matrices, and planes go by their norm.
    """
    assert heads.query is not None and heads.key is not None and heads.value is not None
    read = in_groups(heads, grams(output_weights(model, heads).transpose(1, 2)))
    made = grams(weights(model, heads.value))
    values = [best_subspace(z.expand_as(g), g) for z, g in zip(made, read, strict=True)]
    s = torch.tensor(heads.still, dtype=torch.long)
    asked = in_groups(heads, grams(weights(model, heads.query)[:, s]))
    keys = grams(weights(model, heads.key)[:, s])
    still = [best_subspace(z.expand_as(g), g) for z, g in zip(keys, asked, strict=True)] if heads.still else []
    return spaces_of(heads, values, still, plane_norms(model, heads))


def calibrated(model: nn.Module, heads: Heads, found: Statistics) -> Spaces:
    """The best dimensions for the second moments of what heads output, as W_O reads it; and for the logits' likewise.

    Plain calibrated SVD: the truncation with the least E‖W_O (z − ẑ)‖² over the text, of every head on its own. Rotary
    planes go by √(E‖q‖² E‖k‖²).
    """
    read = in_groups(heads, grams(output_weights(model, heads).transpose(1, 2)))
    out = in_groups(heads, found.out[heads.path])
    values = [best_subspace(z, g) for z, g in zip(out, read, strict=True)]
    s = torch.tensor(heads.still, dtype=torch.long)
    q, k = in_groups(heads, found.query[heads.path]), found.key[heads.path]
    pairs = zip(k[:, s][:, :, s], q[..., s, :][..., s], strict=True)
    still = [best_subspace(z.expand_as(g), g) for z, g in pairs] if heads.still else []
    sizes = [x.diagonal(dim1=-2, dim2=-1) for x in (q, k)]
    return spaces_of(heads, values, still, plane_products(heads, sizes[0].sum(1), sizes[1]))


def norms(model: nn.Module, heads: Heads) -> Spaces:
    """Whole planes of queries and keys by ‖W_Q‖·‖W_K‖, whole places of values by ‖W_V‖·‖W_O‖, nothing turned.

    The vanilla pruning that CLOVER compares itself with (arXiv 2411.17426), rotary planes in pairs.
    """
    assert heads.query is not None and heads.key is not None and heads.value is not None
    read = in_groups(heads, output_weights(model, heads).pow(2).sum(1)).sum(1)
    made = weights(model, heads.value).pow(2).sum(2)
    values = [repeated(coordinates(w), heads.groups) for w in (read * made).sqrt()]
    s = torch.tensor(heads.still, dtype=torch.long)
    asked = in_groups(heads, weights(model, heads.query).pow(2).sum(2)).sum(1)[:, s]
    keys = weights(model, heads.key).pow(2).sum(2)[:, s]
    still = [repeated(coordinates(w), heads.groups) for w in (asked * keys).sqrt()]
    return spaces_of(heads, values, still, plane_norms(model, heads))


def same_everywhere(heads: Heads, share: float) -> Kept:
    """Every head keeps the same: whole planes and still places by the share, and values what the budget then leaves."""
    planes, still = int(share * len(heads.planes) + 1e-9), int(share * len(heads.still) + 1e-9)
    room = int(share * (heads.d_qk + heads.d_v) + 1e-9) - 2 * planes - still
    n = heads.key_heads
    return Kept((min(heads.d_v, room),) * n, (still,) * n, (planes,) * n)


def heads_kept(attentions: Sequence[Heads], worth: dict[str, Tensor], share: float) -> Kepts:
    """The most important key heads of the whole model, all of them or nothing."""
    ranked = sorted(((float(x), h.path, i) for h in attentions for i, x in enumerate(worth[h.path])), reverse=True)
    chosen = {(path, i) for _, path, i in ranked[: int(share * len(ranked) + 1e-9)]}

    def sizes(heads: Heads, size: int) -> tuple[int, ...]:
        return tuple(size if (heads.path, i) in chosen else 0 for i in range(heads.key_heads))

    return {h.path: Kept(sizes(h, h.d_v), sizes(h, len(h.still)), sizes(h, len(h.planes))) for h in attentions}


def smaller(model: nn.Module, spaces: Sequence[Spaces], kept: Kepts, what: str) -> Made:
    """The cut model, dense with zeros: what a slim form would compute, which stores no more than the share."""
    return Made(cut(model, spaces, kept, bias=False).module, spent(model, spaces, kept, what))


def spent(model: nn.Module, spaces: Sequence[Spaces], kept: Kepts, what: str) -> float:
    total = total_cost(spaces, model, what)
    gone = 0
    for s in spaces:
        before, after = whole(s), kept[s.heads.path]
        for kind, unit in (("values", 1), ("still", 1), ("planes", 2)):
            cost = unit * (1 if what == "kv" else weights_per_place(s.heads, model, kind))
            gone += cost * (sum(getattr(before, kind)) - sum(getattr(after, kind)))
    return 1 - gone / total


# Whole matrices


def whitened(weight: Tensor, moment: Tensor, rank: int) -> Tensor:
    """The matrix W' of this rank with the least E‖(W − W')x‖²: with S Sᵀ = E xxᵀ, truncate W S and undo S.

    Wang, Zheng, Wan and Zhang, SVD-LLM: Truncation-aware Singular Value Decomposition for Large Language Model
    Compression, ICLR 2025 (arXiv 2403.07378).
    """
    s = torch.linalg.cholesky(jittered(moment))
    u, values, v = torch.linalg.svd(weight @ s, full_matrices=False)
    return (u[:, :rank] * values[:rank]) @ torch.linalg.solve_triangular(s, v[:rank], upper=False, left=False)


def whitened_matrices(
    model: nn.Module, attentions: Sequence[Heads], found: Statistics, share: float, what: str
) -> Made:
    """SVD-LLM's truncation of matrices at one ratio, without its later fine-tuning.

    For the cache: of W_K and W_V, all key heads as one matrix. What is cached is the r numbers in between; keys before
    rotary positions, so that each step of decoding expands and turns all keys again: its cost is not counted here. For
    attention weights: of all four matrices, which then cost r · (rows + columns).
    """
    module = copy.deepcopy(model)
    kept = total = 0
    for heads in attentions:
        assert heads.query is not None and heads.key is not None and heads.value is not None
        rows = [heads.key, heads.value] if what == "kv" else [heads.query, heads.key, heads.value]
        jobs: list[tuple[str, Tensor | slice]] = [(r.module, r.places.flatten()) for r in rows]
        if what != "kv":
            assert heads.output is not None
            jobs.append((heads.output, slice(None)))
        for path, at in jobs:
            layer = LinearMap(module, path)
            n, m = layer.weight[at].shape
            rank = int(share * n + 1e-9) if what == "kv" else int(share * n * m / (n + m) + 1e-9)
            layer.weight[at] = whitened(layer.weight[at], found.inputs[path], rank)
            layer.store()
            kept += rank if what == "kv" else rank * (n + m)
        total += heads.key_heads * (heads.d_qk + heads.d_v) if what == "kv" else attention_weights(heads, model)
    return Made(module, kept / total)


Every = Callable[[Heads], Spaces]


def same_ranks(model: nn.Module, attentions: Sequence[Heads], spaces: Every, share: float, what: str) -> Made:
    kept = {h.path: same_everywhere(h, share) for h in attentions}
    return smaller(model, [spaces(h) for h in attentions], kept, what)
