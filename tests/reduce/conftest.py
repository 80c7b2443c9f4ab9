"""Small checkpoints with random weights, as folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from deadweight.source.model import open_model
from deadweight.source.narrow_clone import narrow

torch.set_num_threads(1)


def randomise(module: nn.Module, seed: int = 0) -> nn.Module:
    """Weights of ordinary size, biases that are not zero, gains that are not one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            gain = p.ndim == 1 and name.endswith("weight")
            p.copy_(torch.randn(p.shape, generator=generator) * (0.3 if p.ndim > 1 else 0.2 if gain else 0.5) + gain)
    return module


@pytest.fixture
def folder_of(tmp_path: Path) -> Callable[[str], Path]:
    """The narrow clone of an architecture, random, saved as people save their models."""

    def make(architecture: str) -> Path:
        config = getattr(transformers, architecture).config_class()
        config.architectures = [architecture]
        config.save_pretrained(tmp_path / "config")
        module = narrow(open_model(str(tmp_path / "config" / "config.json"))).module.float()
        module.config.architectures, module.config.dtype = [architecture], "float32"
        randomise(module).save_pretrained(tmp_path / "source")
        return tmp_path / "source"

    return make


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    """The tied GPT-2 of the reference counts: width 8, 2 heads, 2 layers, 345 redundant dimensions of 1,208."""
    config = transformers.GPT2Config(
        n_embd=8, n_head=2, n_layer=2, vocab_size=11, n_positions=32, n_inner=12, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    randomise(model).save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2"
