"""Layers that people stack in plain PyTorch: the laws explain every redundant dimension that is counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

IMAGE = torch.randn(3, 2, 6, 6)


def between(*layers: nn.Module) -> nn.Sequential:
    """Two convolutions with ReLU behind the first, and layers that act on each channel alike."""
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), *layers, nn.Conv2d(4, 3, 1))


POOLS = [nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(2), nn.Upsample(scale_factor=2, mode="bilinear"), nn.ReplicationPad2d(1)]


@pytest.mark.parametrize("layer", POOLS, ids=lambda layer: type(layer).__name__)
def test_units_keep_their_scale_behind_pooling_and_resizing(examine: Callable[..., Any], layer: nn.Module) -> None:
    told = examine(between(layer), IMAGE, complete=True)
    assert told.dof("DW011") == told.audit.completeness.measured == 4


class Edges(nn.Module):
    """Messages along edges, added where they arrive."""

    def __init__(self, reduce: str) -> None:
        super().__init__()
        self.message, self.out, self.reduce = nn.Linear(4, 5), nn.Linear(5, 2), reduce
        self.register_buffer("goal", torch.tensor([0, 1, 0, 2, 1]))

    def forward(self, x: Tensor) -> Tensor:
        arrived = torch.zeros(3, 5, dtype=x.dtype)
        messages, goal = torch.relu(self.message(x)), self.goal[:, None].expand(-1, 5)
        if self.reduce == "index_add":
            return self.out(arrived.index_add_(0, self.goal, messages))
        return self.out(arrived.scatter_reduce(0, goal, messages, self.reduce, include_self=False))


@pytest.mark.parametrize("reduce", ["index_add", "sum", "mean", "amax"])
def test_messages_on_a_graph_have_a_scale_for_each_channel(examine: Callable[..., Any], reduce: str) -> None:
    told = examine(Edges(reduce), torch.randn(5, 4), complete=True)
    assert told.dof("DW011") == told.audit.completeness.measured == 5


def test_units_keep_their_scale_behind_the_dropout_of_a_transformer_layer(examine: Callable[..., Any]) -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True, norm_first=True)
    assert examine(layer, torch.randn(2, 3, 4), training=True).dof("DW011") == 6


class Activated(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.function = nn.Linear(4, 5), nn.Linear(5, 2), function

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.function(self.up(x)))


@pytest.mark.parametrize(
    ("function", "scales"),
    [
        (lambda h: h.clamp(min=0), 5),
        (lambda h: h.clamp_min(0.0), 5),
        (lambda h: F.rrelu(h), 5),
        (lambda h: h.clamp(min=0, max=6), 0),
        (lambda h: h.clamp(min=0.1), 0),
        (lambda h: h.clamp(max=0), 0),
    ],
)
def test_relu_by_other_names_is_relu(examine: Callable[..., Any], function: Callable, scales: int) -> None:
    assert examine(Activated(function), torch.randn(6, 4)).dof("DW011") == scales


def test_instance_norm_on_running_statistics_folds_as_batch_norm_does(examine: Callable[..., Any]) -> None:
    norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    told = examine(nn.Sequential(nn.Conv2d(2, 4, 3), norm), IMAGE)
    assert told.dof("DW004") == 8


class Gained(nn.Module):
    """A factor for each channel, and what is done before and behind it."""

    def __init__(self, before: nn.Module, width: int, behind: nn.Module, *, channels_first: bool = False) -> None:
        super().__init__()
        self.before, self.behind = before, behind
        self.gain = nn.Parameter(torch.randn(width, 1, 1) if channels_first else torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.before(x) * self.gain)


VECTOR = torch.randn(9, 4)
GAINS = {
    "behind tanh": (Gained(nn.Sequential(nn.Linear(4, 5), nn.Tanh()), 5, nn.Linear(5, 2)), VECTOR, 5),
    "of the input": (Gained(nn.Identity(), 4, nn.Linear(4, 2)), VECTOR, 4),
    "of an image": (Gained(nn.Tanh(), 2, nn.Conv2d(2, 3, 3), channels_first=True), IMAGE, 2),
    "before tanh": (Gained(nn.Tanh(), 4, nn.Sequential(nn.Tanh(), nn.Linear(4, 2))), VECTOR, 0),
    "of a layer": (Gained(nn.Linear(4, 5), 5, nn.Sequential(nn.ReLU(), nn.Linear(5, 2))), VECTOR, 10),
    "of a ReLU": (Gained(nn.Sequential(nn.Linear(4, 5), nn.ReLU()), 5, nn.Linear(5, 2)), VECTOR, 10),
}


@pytest.mark.parametrize("case", GAINS)
def test_a_factor_per_channel_trades_scale_with_what_reads_it(examine: Callable[..., Any], case: str) -> None:
    module, x, scales = GAINS[case]
    told = examine(module, x, complete=True)
    assert told.dof("DW011") == told.audit.completeness.measured == scales


class Columns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain, self.out = nn.Parameter(torch.randn(6)), nn.Conv2d(2, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(x) * self.gain)


def test_a_factor_for_each_column_of_an_image_is_none_for_channels(examine: Callable[..., Any]) -> None:
    assert examine(Columns(), IMAGE).dof("DW011") == 0


NORMS = [nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True), nn.BatchNorm2d(4)]


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: type(norm).__name__)
@pytest.mark.parametrize("relu", [False, True])
def test_convolutions_take_the_gain_of_a_norm_of_images(
    examine: Callable[..., Any], norm: nn.Module, relu: bool
) -> None:
    behind = [nn.ReLU()] if relu else []
    module = nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), norm, *behind, nn.Conv2d(4, 3, 1))
    assert examine(module, IMAGE, training=True).dof("DW006") == (4 if relu else 8)


class Parts(nn.Module):
    """A layer whose outputs are read in part, and another that reads them."""

    def __init__(self, read: Callable[[nn.Module, Tensor], Any], rows: int = 6, inner: int = 4) -> None:
        super().__init__()
        self.layer, self.out, self.places = nn.Linear(4, rows), nn.Linear(inner, 3), nn.Parameter(torch.randn(12, 4))
        self.read = read

    def forward(self, x: Tensor) -> Any:
        return self.read(self, x), self.places.sum(0)


LONG = torch.randn(2, 9, 4)  # nine tokens


def test_rows_whose_outputs_are_cut_off_are_dead(examine: Callable[..., Any]) -> None:
    half = examine(Parts(lambda m, x: m.out(torch.tanh(m.layer(x).chunk(2, -1)[0])), rows=8), LONG, complete=True)
    assert half.dead("layer.weight") is half.dead("layer.bias") is False
    assert half.pieces("DW001", "layer.weight") == half.pieces("DW001", "layer.bias") == [(4, 8)]
    padded = examine(Parts(lambda m, x: m.layer(x)[..., :50], rows=64), LONG)
    assert padded.pieces("DW001", "layer.weight") == [(50, 64)]
    assert padded.found("DW001", "layer.weight")[0].note == "for inputs of the example's sizes"


@pytest.mark.parametrize(
    "read",
    {
        "scores for each place, as many as there are": lambda m, x: m.layer(x)[..., : x.shape[1]].softmax(-1) @ x,
        "places beyond the example": lambda m, x: m.layer(x + m.places[: x.shape[1]]),
        "another reads what is cut": lambda m, x: m.layer(x)[..., :1].tanh() * m.layer(x)[..., 1:],
        "another use reads the rest": lambda m, x: m.layer(x)[..., :2].sum(-1, True) * m.layer(x.sin()).tanh(),
    }.items(),
    ids=lambda pair: pair[0],
)
def test_rows_that_other_inputs_or_uses_read_are_not_dead(examine: Callable[..., Any], read: tuple) -> None:
    told = examine(Parts(read[1], rows=12), LONG)
    assert not told.found("DW001", "layer.weight") + told.found("DW001", "places")


class Encoded(nn.Module):
    def __init__(self, compare: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.encode, self.compare = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), compare

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.compare(self.encode(a), self.encode(b))


@pytest.mark.parametrize(
    ("compare", "dead"),
    [
        (lambda a, b: (a - b).abs().sum(-1), True),
        (lambda a, b: F.pairwise_distance(a, b), True),
        (torch.cdist, True),
        (lambda a, b: torch.diff(a, dim=1).tanh() + torch.diff(b, dim=1).tanh(), True),
        (lambda a, b: (a - a.max(1, keepdim=True)[0]).exp() + b.std(1, keepdim=True), True),
        (lambda a, b: (a - 2 * b).tanh(), False),
        (lambda a, b: F.cosine_similarity(a, b, -1), False),
        (lambda a, b: (a - b) * a, False),
    ],
)
def test_a_bias_that_both_sides_of_a_difference_carry_is_dead(
    examine: Callable[..., Any], compare: Callable, dead: bool
) -> None:
    told = examine(Encoded(compare), torch.randn(2, 3, 4), torch.randn(2, 3, 4))
    assert told.dead("encode.2.bias") is dead
    assert not told.dead("encode.0.bias")


class TopScores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).mT
        low = scores < scores.topk(3, -1).values[..., -1:]
        return scores.masked_fill(low, -torch.inf).softmax(-1) @ x


def test_a_key_bias_does_not_change_which_scores_are_the_highest(examine: Callable[..., Any]) -> None:
    assert examine(TopScores(), LONG).dead("k.bias")
