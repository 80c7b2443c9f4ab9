"""Small Hugging Face folders, made on the spot: nothing here needs the network."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig

transformers.logging.set_verbosity_error()

TINY = {"n_embd": 8, "n_head": 2, "n_layer": 2, "vocab_size": 11, "n_positions": 5, "n_inner": 12}


@pytest.fixture
def tiny_config() -> GPT2Config:
    return GPT2Config(**TINY, bos_token_id=0, eos_token_id=0, architectures=["GPT2LMHeadModel"])


@pytest.fixture
def folder(tmp_path: Path, tiny_config: GPT2Config) -> Path:
    """A complete checkpoint."""
    torch.manual_seed(0)
    path = tmp_path / "tiny"
    GPT2LMHeadModel(tiny_config).save_pretrained(path)
    return path


@pytest.fixture
def config_folder(tmp_path: Path) -> Path:
    """A config of seven billion parameters, and no weights."""
    path = tmp_path / "large"
    LlamaConfig(architectures=["LlamaForCausalLM"]).save_pretrained(path)
    return path
