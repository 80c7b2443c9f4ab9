"""Memory and number of operations of an audit of a plain module, and that test suite and check count the same.

A module of 100 million parameters may take 3 GB above its imports. Here it is smaller, and the bound is per parameter.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import deadweight
from deadweight.graph import evaluate as evaluation
from deadweight.testing import assert_no_deadweight

BYTES_PER_PARAMETER = 30  # 3 GB for 100 million; most of it is one copy in float64 and the gradient of it
PEAK = """
import resource, sys, torch
from torch import nn
import deadweight

def encoder(width, depth):
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)

def audited(width, depth):
    deadweight.audit(encoder(width, depth), (torch.randn(2, 16, width),))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

model = encoder(512, 8)
size = sum(p.numel() for p in model.parameters())
before = audited(32, 2)  # whatever is imported late is imported now
print(size, audited(512, 8) - before)
"""
FACTORY = """
import sys
sys.path.insert(0, {folder!r})
from test_large_modules import decoder, encoder
"""


class Block(nn.Module):
    """A block of GPT, with one projection for queries, keys and values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class Decoder(nn.Module):
    """A small GPT in plain PyTorch, its table tied to the head."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(64, width), nn.Embedding(16, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)), nn.LayerNorm(width))
        self.head = nn.Linear(width, 64, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))))


def decoder(depth: int = 3) -> tuple[nn.Module, tuple[Tensor]]:
    torch.manual_seed(0)
    return Decoder(32, depth), (torch.arange(32).reshape(2, 16),)


def encoder(depth: int = 3) -> tuple[nn.Module, tuple[Tensor]]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 128, batch_first=True)
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False), (torch.randn(2, 16, 32),)


Make = Callable[..., tuple[nn.Module, tuple[Tensor]]]


def test_memory_of_an_audit_stays_below_its_bound_per_parameter() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, env=environment, check=True)
    size, peak = map(int, ended.stdout.split())
    assert size > 25_000_000
    assert peak < BYTES_PER_PARAMETER * size


@pytest.mark.parametrize("make", [decoder, encoder])
def test_operations_of_an_audit_grow_with_the_depth_and_no_faster(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for depth in (2, 6):
        calls = []
        original = evaluation.value_of
        with monkeypatch.context() as patch:
            patch.setattr(evaluation, "value_of", lambda *a, f=original, c=calls: c.append(1) or f(*a))
            deadweight.audit(*make(depth))
        counts.append(len(calls))
    assert 0 < counts[0] <= counts[1] <= 3 * counts[0]  # three times as deep; equal blocks may be evaluated once


@pytest.mark.parametrize("make", [decoder, encoder])
def test_an_assertion_and_a_check_count_the_same_findings(
    make: Make, run: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, inputs = make()
    failing = [f for f in deadweight.audit(module, inputs).findings if f.fails("folds")]
    with pytest.raises(AssertionError) as failure:
        assert_no_deadweight(module, inputs)
    assert str(failure.value).splitlines()[0].endswith(f" has {sum(f.dof for f in failing):,} redundant dimensions:")
    (tmp_path / "built.py").write_text(FACTORY.format(folder=str(Path(__file__).parent)), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    code, said, _ = run("audit", f"built:{make.__name__}", "--check")
    assert code == 1 and f"check: {len(failing)} findings fail" in said
