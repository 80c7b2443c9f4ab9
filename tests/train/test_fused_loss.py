"""The kernel of the loss, run by Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from deadweight.train.fused_loss import is_fused

CHECK = """
import torch
from torch.nn.functional import cross_entropy
from deadweight.train.triton_loss import row_kernel

torch.manual_seed(0)
cases = (5, 1000, torch.float32, 1e-6), (3, 20000, torch.float32, 1e-6), (4, 9000, torch.bfloat16, 2e-3)
for rows, width, dtype, near in cases:
    logits, targets = (torch.randn(rows, width) * 4).to(dtype), torch.randint(0, width, (rows,))
    exact = logits.float().requires_grad_()
    cross_entropy(exact, targets).backward()
    losses, inside = torch.empty(rows), logits.clone()
    row_kernel[(rows,)](inside, targets, losses, 1.0 / rows, width, block=4096, num_warps=4)
    assert torch.allclose(losses, cross_entropy(logits.float(), targets, reduction="none"), atol=1e-5)
    assert torch.allclose(inside.float(), exact.grad, atol=near), (inside.float() - exact.grad).abs().max()
    assert not torch.allclose(inside.float(), 2 * exact.grad, atol=near)
"""


def test_the_kernel_gives_the_loss_and_its_gradient() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", CHECK], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_cpu_a_small_vocabulary_and_a_bias_take_the_plain_loss() -> None:
    hidden = torch.zeros(2, 8)
    assert not is_fused(hidden, nn.Linear(8, 5000, bias=False), torch.bfloat16)
    assert not is_fused(hidden, nn.Linear(8, 256, bias=False), torch.bfloat16)
