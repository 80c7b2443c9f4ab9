"""verify: what is the same is called the same, and what is not is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import deadweight
from deadweight.cli import app
from deadweight.reduce.run import Trial
from deadweight.reduce.shifts import Drop


def changed(folder: Path, to: Path, name: str, by: float) -> Path:
    """A copy of a checkpoint with one number moved."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(to)
    tensors = load_file(to / "model.safetensors")
    tensors[name].reshape(-1)[0] += by
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


def test_a_checkpoint_is_itself(gpt2: Path) -> None:
    found = deadweight.verify(gpt2, gpt2)
    assert found.same and found.errors[0].float64 == 0


def test_a_dead_number_may_move_and_its_neighbour_may_not(gpt2: Path, tmp_path: Path) -> None:
    tensors = load_file(gpt2 / "model.safetensors")
    name = next(n for n in tensors if n.endswith("h.0.attn.c_attn.bias"))
    key, query = tensors[name].clone(), tensors[name].clone()
    key[8], query[0] = key[8] + 0.3, query[0] + 1e-3
    for bias, same in ((key, True), (query, False)):
        folder = tmp_path / f"moved-{same}"
        transformers.AutoModelForCausalLM.from_pretrained(gpt2).save_pretrained(folder)
        save_file(tensors | {name: bias}, folder / "model.safetensors", {"format": "pt"})
        assert deadweight.verify(gpt2, folder).same is same


def test_exit_status_says_whether_they_are_the_same(gpt2: Path, tmp_path: Path) -> None:
    other = changed(gpt2, tmp_path / "other", "transformer.wte.weight", 0.1)
    assert CliRunner().invoke(app, ["verify", str(gpt2), str(gpt2)]).exit_code == 0
    result = CliRunner().invoke(app, ["verify", str(gpt2), str(other)])
    assert result.exit_code == 1 and "different" in result.output


def test_models_of_different_kinds_are_refused(gpt2: Path, tmp_path: Path) -> None:
    config = transformers.BertConfig(
        hidden_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=11, intermediate_size=12
    )
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    with pytest.raises(deadweight.DeadweightError, match="different inputs"):
        deadweight.verify(gpt2, tmp_path / "bert")


@pytest.fixture
def wrong_on_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rewrite that moves the query bias while it drops the key bias."""
    honest = Drop.apply

    def apply(self: Drop, tensors: Any) -> Any:
        facts = honest(self, tensors)
        tensors[self.target] = torch.cat([tensors[self.target][:4] + 0.5, tensors[self.target][4:]])
        return facts

    monkeypatch.setattr(Drop, "apply", apply)


@pytest.mark.usefixtures("wrong_on_purpose")
def test_a_rewrite_above_the_noise_is_left_out_and_named(gpt2: Path, tmp_path: Path) -> None:
    found = deadweight.reduce(gpt2, tmp_path / "out", layout="stock")
    assert "DW002" not in {s.code for s in found.steps}
    assert {s.why for s in found.skipped if s.code == "DW002"} == {
        "would exceed 3 times the noise of the model's own precision"
    }
    assert deadweight.verify(gpt2, tmp_path / "out").same


@pytest.mark.usefixtures("wrong_on_purpose")
def test_a_different_function_is_never_written(gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trial, "fits", lambda self, rewrites: True)  # let it through to the last check
    result = CliRunner().invoke(app, ["reduce", str(gpt2), str(tmp_path / "out"), "--layout", "stock"])
    assert result.exit_code == 1 and not (tmp_path / "out").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["gpt2"]
