"""verify: equal functions are called the same, and different ones are not."""

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
from deadweight.graph.node import Graph, Node
from deadweight.reduce.comparison import DRAWS, inputs_to_draw
from deadweight.reduce.trial import Tried
from deadweight.rewrite.shifts import Drop


def changed(folder: Path, to: Path, name: str, by: float) -> Path:
    """A copy of a checkpoint with one number moved."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(to)
    tensors = load_file(to / "model.safetensors")
    tensors[name].reshape(-1)[0] += by
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


def test_a_checkpoint_equals_itself(gpt2: Path) -> None:
    result = deadweight.verify(gpt2, gpt2)
    assert result.same and result.errors[0].float64 == 0


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

    def apply(self: Drop, tensors: Any, known: Any) -> Any:
        facts = honest(self, tensors, known)
        tensors[self.target] = torch.cat([tensors[self.target][:4] + 0.5, tensors[self.target][4:]])
        return facts

    monkeypatch.setattr(Drop, "apply", apply)


@pytest.mark.usefixtures("wrong_on_purpose")
def test_a_rewrite_above_the_noise_is_left_out_and_named(gpt2: Path, tmp_path: Path) -> None:
    result = deadweight.reduce(gpt2, tmp_path / "out", layout="stock")
    assert "DW002" not in {s.code for s in result.steps}
    assert {s.why for s in result.skipped if s.code == "DW002"} == {
        "it would exceed 3 times the rounding noise of the model's own precision"
    }
    assert deadweight.verify(gpt2, tmp_path / "out").same


@pytest.mark.usefixtures("wrong_on_purpose")
def test_a_different_function_is_never_written(gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tried, "fits", True)  # let it through to the last check
    result = CliRunner().invoke(app, ["reduce", str(gpt2), str(tmp_path / "out"), "--layout", "stock"])
    assert result.exit_code == 1 and not (tmp_path / "out").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["gpt2"]


def gpt2_of(folder: Path, **sizes: Any) -> Path:
    known = {"n_embd": 8, "n_head": 2, "n_layer": 2, "vocab_size": 11, "n_positions": 32, "n_inner": 12}
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**known | sizes, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False)
    )
    torch.nn.init.normal_(model.lm_head.weight)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("first", [11, 13])
def test_other_vocabularies_are_refused_from_either_side(tmp_path: Path, first: int) -> None:
    a, b = gpt2_of(tmp_path / "a", vocab_size=first), gpt2_of(tmp_path / "b", vocab_size=24 - first)
    with pytest.raises(deadweight.DeadweightError, match=rf"differ in shape: \[\[1, 24, {first}\]\] and"):
        deadweight.verify(a, b)
    for folder in (a, b):
        transformers.GPT2Model.from_pretrained(folder).save_pretrained(folder.with_suffix(".base"))
    if first == 13:  # without logits only the ids tell: not all of the first model's are tokens of the second
        with pytest.raises(deadweight.DeadweightError, match="fewer rows"):
            deadweight.verify(a.with_suffix(".base"), b.with_suffix(".base"))


def test_a_model_with_fewer_positions_is_compared_on_those_that_both_have(tmp_path: Path) -> None:
    long = gpt2_of(tmp_path / "long")
    short, other = (transformers.GPT2LMHeadModel.from_pretrained(long) for _ in range(2))
    for model, moved in ((short, 0.0), (other, 1.0)):
        table = torch.nn.Embedding.from_pretrained(model.transformer.wpe.weight[:16] + moved * torch.eye(16, 8))
        model.transformer.wpe, model.config.n_positions = table, 16
        model.save_pretrained(tmp_path / str(moved))
        for pair in ((long, tmp_path / str(moved)), (tmp_path / str(moved), long)):
            assert deadweight.verify(*pair).same is not bool(moved)


def test_nan_equals_no_other_value(gpt2: Path, tmp_path: Path) -> None:
    broken = changed(gpt2, tmp_path / "broken", "transformer.h.0.mlp.c_fc.weight", float("nan"))
    assert not deadweight.verify(gpt2, broken).same
    with pytest.raises(deadweight.DeadweightError, match="returns NaN"):
        deadweight.verify(broken, broken)


def test_infinities_are_compared_by_their_sign() -> None:
    from deadweight.reduce.comparison import difference

    low, high = torch.tensor([1.0, -torch.inf]), torch.tensor([1.0, torch.inf])
    assert difference(low, low) == (0.0, 1.0)
    assert difference(low, high)[0] == difference(torch.tensor([1.0, 0.0]), low)[0] == float("inf")


def test_a_tokenizer_of_another_model_is_not_used(gpt2: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"word{i}": i for i in range(1000)} | {"the": 1000, "?": 1001}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(gpt2)
    assert deadweight.reduce(gpt2, tmp_path / "out").verification is not None
    assert "text" not in deadweight.verify(gpt2, tmp_path / "out").inputs


def drawn(outputs: int, work: int) -> int:
    """How many inputs a model is compared on that returns so many numbers and computes so many for one input."""
    nodes = {
        "hidden": Node("hidden", "aten.tanh", shape=(work - outputs,), dtype=torch.float32),
        "out": Node("out", "aten.tanh", shape=(outputs,), dtype=torch.float32),
    }
    return inputs_to_draw(Graph(nodes, {}, ("out",)))


def test_small_outputs_are_compared_on_many_inputs_and_costly_ones_on_two_at_least() -> None:
    assert drawn(10, 1_000) == 4 * DRAWS
    assert drawn(5_000, 1 << 40) == DRAWS
    assert drawn(50_000, 1_000_000) == DRAWS
    assert drawn(50_000, 1 << 40) == 2
