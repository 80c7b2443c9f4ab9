"""Muon: orthogonal updates for matrices, AdamW for the rest, one learning rate for both."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from deadweight.errors import DeadweightError
from deadweight.train import Run, make_run, train
from deadweight.train.optimizer import Muon, make_optimizer, orthogonalised
from deadweight.train.settings import Train
from deadweight.transformer import TransformerConfig, TransformerForCausalLM

Tiny = Callable[..., Run]
CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [(16, 16), (8, 32), (32, 8)])
def test_singular_values_end_near_one_and_the_singular_vectors_stay(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(3, *shape, dtype=torch.float64)
    result = orthogonalised(matrix)
    values = torch.linalg.svdvals(result)
    assert float(values.min()) > 0.6 and float(values.max()) < 1.3  # five steps of this iteration end in this range
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    inner = u.mT @ result @ v.mT  # diagonal if the singular vectors are the same
    assert float((inner - torch.diag_embed(inner.diagonal(dim1=-2, dim2=-1))).abs().max()) < 1e-8


def test_an_update_has_the_size_that_adamw_would_make() -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(64, 256))
    weight.grad = torch.randn(64, 256)
    Muon([{"params": [weight], "rule": "muon", "weight_decay": 0.0}], learning_rate=1.0, betas=(0.9, 0.95)).step()
    assert 0.7 * 0.2 < float(weight.detach().square().mean().sqrt()) < 1.2 * 0.2


def test_vectors_and_tables_take_the_steps_of_adamw() -> None:
    torch.manual_seed(0)
    model = TransformerForCausalLM(TransformerConfig(d_model=16, n_layers=1, heads=2, context=8, vocab_size=20))
    other = TransformerForCausalLM(model.config)
    other.load_state_dict(model.state_dict())
    tokens = torch.randint(20, (2, 8))
    for made, name in ((model, "muon"), (other, "adamw")):
        optimizer = make_optimizer(made, Train(optimizer=name, learning_rate=1e-3), CPU)
        made(tokens, labels=tokens).loss.backward()
        optimizer.step()
    for name in ("transformer.tokens.weight", "transformer.places.weight", "transformer.norm.weight"):
        assert torch.allclose(model.get_parameter(name), other.get_parameter(name), atol=1e-7)
    name = "transformer.layers.0.mlp.up.weight"
    assert not torch.allclose(model.get_parameter(name), other.get_parameter(name), atol=1e-5)


def test_a_model_trains_with_muon_about_as_well_as_with_adamw(tiny: Tiny, tmp_path: Path) -> None:
    run = tiny(train__optimizer="muon", train__steps=40, train__learning_rate=1e-2)
    muon = train(run, tmp_path / "muon")
    lines = (tmp_path / "muon" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines if '"loss"' in line]
    assert losses[-1] < losses[0] - 0.5
    adamw = train(tiny(train__steps=40, train__learning_rate=1e-2), tmp_path / "adamw")
    assert muon.valid_loss < 1.2 * adamw.valid_loss


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(DeadweightError, match="found optimizer = 'sgd'; expected adamw or muon"):
        make_run({"train": {"optimizer": "sgd"}})
