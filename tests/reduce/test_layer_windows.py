"""A model that does not fit into memory twice is compared a few layers at a time, and as strictly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

import deadweight
from deadweight.graph import evaluate
from deadweight.reduce import layer_windows, run
from deadweight.reduce.error_limits import DifferentError

from .conftest import randomise


@pytest.fixture
def deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight layers in bfloat16, on a machine that has no memory left."""
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=8,
        vocab_size=50,
        tie_word_embeddings=False,
    )
    randomise(transformers.LlamaForCausalLM(config)).bfloat16().save_pretrained(tmp_path / "deep")
    monkeypatch.setattr(run, "free_memory", lambda: 0)
    monkeypatch.setattr(evaluate, "PIECE", 100)  # so that weights really come in pieces
    return tmp_path / "deep"


def test_the_first_and_the_last_layers_are_compared_in_float64(deep: Path, tmp_path: Path) -> None:
    result = deadweight.reduce(deep, tmp_path / "out")
    assert result.verification is not None and "layers 0 to" in result.verification.inputs
    assert "7 on their own" in result.verification.inputs
    assert 0 < result.verification.worst.float64 < 1e-12
    assert any("a few layers at a time" in note for note in result.notes)


def test_pieces_give_what_the_whole_gives(deep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deadweight.reduce(deep, tmp_path / "parts")
    monkeypatch.undo()
    deadweight.reduce(deep, tmp_path / "whole")
    parts, whole = (load_file(tmp_path / n / "model.safetensors") for n in ("parts", "whole"))
    shared = [n for n in whole if n in parts and parts[n].shape == whole[n].shape]
    assert len(shared) > 40
    torch.testing.assert_close({n: parts[n] for n in shared}, {n: whole[n] for n in shared})


def test_a_wrong_weight_is_found_and_nothing_is_written(
    deep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = layer_windows.Window.reduced

    def wrong(self: layer_windows.Window, name: str) -> object:
        value = read(self, name)
        if name == "model.layers.7.mlp.up_proj.weight":
            value = evaluate.as_float64(value).clone()
            value[0, 0] += 1e-6
        return value

    monkeypatch.setattr(layer_windows.Window, "reduced", wrong)
    with pytest.raises(DifferentError, match=r"is not the same function.*nothing was written"):
        deadweight.reduce(deep, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["deep"]


def test_a_model_that_cannot_be_compared_says_so(deep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "open_windows", lambda *_: None)
    result = deadweight.reduce(deep, tmp_path / "out")
    assert result.verification is None and any("NOT compared" in note for note in result.notes)
