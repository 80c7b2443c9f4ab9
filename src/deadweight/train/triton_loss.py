"""The kernel behind `fused_loss`; importing this file needs Triton."""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor
from torch.library import triton_op, wrap_triton

BLOCK, WARPS = 16384, 16
LOG2E: Any = tl.constexpr(1.4426950408889634)


@triton.jit
def row_kernel(logits, targets, losses, scale, width: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """One row: log Σ exp by blocks, then (softmax − one-hot)·scale over it. exp2 is faster than exp."""
    row = tl.program_id(0).to(tl.int64)
    start_of_row = logits + row * width
    target = tl.load(targets + row)
    places = tl.arange(0, block)
    top = -float("inf")
    total = 0.0
    for start in range(0, width, block):
        inside = start + places < width
        x = tl.load(start_of_row + start + places, mask=inside, other=-float("inf")).to(tl.float32) * LOG2E
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(x - higher), 0)
        top = higher
    whole = top + tl.log2(total)
    own = tl.load(start_of_row + target).to(tl.float32) * LOG2E
    tl.store(losses + row, (whole - own) / LOG2E)
    for start in range(0, width, block):
        inside = start + places < width
        x = tl.load(start_of_row + start + places, mask=inside, other=-float("inf")).to(tl.float32) * LOG2E
        p = tl.exp2(x - whole)
        p = tl.where(start + places == target, p - 1.0, p) * scale
        tl.store(start_of_row + start + places, p.to(logits.dtype.element_ty), mask=inside)


@triton_op("deadweight::losses_in_place", mutates_args={"logits"})
def losses_in_place(logits: Tensor, targets: Tensor) -> Tensor:
    """−log softmax(logits)[target] per row; the logits become the gradient of the mean."""
    rows, width = logits.shape
    losses = torch.empty(rows, device=logits.device, dtype=torch.float32)
    wrap_triton(row_kernel)[(rows,)](logits, targets, losses, 1.0 / rows, width, block=BLOCK, num_warps=WARPS)
    return losses
