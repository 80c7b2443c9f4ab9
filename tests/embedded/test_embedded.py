"""The packaged model loads offline, is what it says, and reads English."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from deadweight import embedded

CONTEXT = 256


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(embedded.path(), local_files_only=True).eval()


@pytest.fixture(scope="module")
def windows() -> Tensor:
    """32 windows spread over all of prose(), each one byte longer than the context."""
    ids = torch.tensor(embedded.tokens(embedded.prose()))
    starts = torch.linspace(0, len(ids) - CONTEXT - 1, 32).long()
    return ids[starts[:, None] + torch.arange(CONTEXT + 1)]


@torch.no_grad()
def bits_per_byte(model: nn.Module, windows: Tensor) -> float:
    logits = model(windows[:, :-1]).logits
    return cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item() / math.log(2)


def test_the_folder_is_found_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert embedded.path().is_absolute()
    assert {file.name for file in embedded.path().iterdir()} == {"config.json", "model.safetensors", "training.json"}


def test_the_model_takes_at_most_8_megabytes() -> None:
    assert sum(file.stat().st_size for file in embedded.path().iterdir()) <= 8_000_000


def test_the_model_is_a_byte_level_gpt2_with_heads_of_64(model: nn.Module) -> None:
    config = model.config
    assert config.architectures == ["GPT2LMHeadModel"]
    assert (config.vocab_size, config.n_positions) == (256, CONTEXT)
    assert (config.n_embd, config.n_head, config.n_layer) == (192, 3, 4)
    assert config.n_embd // config.n_head == 64
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_the_head_and_the_embedding_are_one_parameter(model: nn.Module) -> None:
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_every_bias_was_trained_away_from_zero(model: nn.Module) -> None:
    biases = {name: p for name, p in model.named_parameters() if name.endswith("bias")}
    assert len(biases) == 4 * 6 + 1
    assert [name for name, bias in biases.items() if (bias == 0).any()] == []


def test_the_model_reads_english(model: nn.Module, windows: Tensor) -> None:
    # 1.93 bits measured on CPython 3.11's manual; other versions carry other pages
    assert bits_per_byte(model, windows) < 2.5


def test_the_model_does_not_read_shuffled_english(model: nn.Module, windows: Tensor) -> None:
    order = torch.randperm(windows.shape[1], generator=torch.Generator().manual_seed(0))
    # 7.0 bits measured; single English bytes hold over 4, and without their order nothing does better
    assert bits_per_byte(model, windows[:, order]) > 4


def test_the_training_record_names_its_result_and_its_machine(model: nn.Module) -> None:
    record = json.loads((embedded.path() / "training.json").read_text())
    assert record["parameters"] == sum(p.numel() for p in model.parameters())
    assert record["held_out"]["bits_per_byte"] < 1.7
    assert record["machine"] == "NVIDIA H200"


@pytest.mark.parametrize("string", ["", "plain", "naïve Δx → 0", "two\nlines"])
def test_tokens_are_bytes_and_text_is_their_inverse(string: str) -> None:
    ids = embedded.tokens(string)
    assert len(ids) == len(string.encode())
    assert all(0 <= i < 256 for i in ids)
    assert embedded.text(ids) == string


def test_a_cut_character_reads_as_a_replacement_and_does_not_raise() -> None:
    assert embedded.text(embedded.tokens("Δ")[:1]) == "\ufffd"


def test_prose_is_long_and_has_no_grammar_or_code_blocks() -> None:
    lines = embedded.prose().split("\n")
    assert sum(map(len, lines)) > 100_000
    assert all(line[0].isupper() and line.endswith(".") for line in lines)
    assert not any("***" in line for line in lines)
