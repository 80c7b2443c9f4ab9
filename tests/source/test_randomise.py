"""Random parameters: all of them change, ties stay, and scales are kept."""

import pytest
import torch
from torch import nn

from deadweight.errors import DeadweightError
from deadweight.source.randomise import randomise


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4, padding_idx=0), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


def test_tied_parameters_stay_tied() -> None:
    clone = randomise(Tied())
    assert clone.head.weight is clone.embed.weight


def test_no_parameter_keeps_its_value_and_the_original_keeps_all() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    before = {name: p.clone() for name, p in module.named_parameters()}
    clone = randomise(module)
    for name, value in clone.named_parameters():
        assert value.dtype == torch.float64 and not (value == before[name]).any()
        assert torch.equal(module.get_parameter(name), before[name])


def test_gains_lie_around_one_and_weights_keep_the_variance() -> None:
    clone = randomise(nn.Sequential(nn.Linear(400, 400), nn.LayerNorm(4000)))
    assert abs(clone[1].weight.mean() - 1) < 0.03 and 0.25 < clone[1].weight.std() < 0.35
    assert 0.045 < clone[0].weight.std() < 0.055


def test_running_variances_are_positive_and_other_buffers_stay() -> None:
    module = nn.Sequential(nn.BatchNorm1d(50))
    module.register_buffer("table", torch.arange(3.0))
    clone = randomise(module)
    assert (clone[0].running_var > 0.4).all() and clone[0].running_var.std() > 0.1
    assert torch.equal(clone.table, module.table.double())


def test_a_padding_row_gets_its_gradient() -> None:
    clone = randomise(Tied())
    clone.embed(torch.tensor([0])).sum().backward()
    assert (clone.embed.weight.grad[0] == 1).all()


def test_parameters_without_values_are_refused() -> None:
    with pytest.raises(DeadweightError, match="weight is on the meta device"):
        randomise(nn.Linear(2, 2, device="meta"))
