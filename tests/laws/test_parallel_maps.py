"""DW020: what is added to a full linear map of the same value, and is a linear map of it, folds into its weight."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

X, IMAGE, WORDS = torch.randn(5, 4, 6), torch.randn(2, 3, 9, 9), torch.randint(0, 11, (2, 5))


class Mixed(nn.Module):
    """`inner` between layers that make its input general and its output matter."""

    def __init__(self, inner: nn.Module, width: int = 6) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(6, 6), inner, nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.inner(torch.tanh(self.first(x)))))


class Imaged(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Conv2d(3, 4, 1), inner, nn.Conv2d(4, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.inner(torch.tanh(self.first(x)))))


class Worded(nn.Module):
    """Words whose vectors meet other positions twice."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.mix, self.last = inner, nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, words: Tensor) -> Tensor:
        x = self.inner(words)
        x = x + torch.tanh(self.mix(x.cumsum(1)))
        return self.last(x * x.roll(1, 1))


class Sum(nn.Module):
    """The results of all parts, added; a list is a chain."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        total = self.parts[0](x)
        for part in self.parts[1:]:
            total = total + part(x)
        return total


class Function(nn.Module):
    """Any code with the parts that it calls."""

    def __init__(self, code: Callable[..., Tensor], **parts: nn.Module | nn.Parameter | Tensor) -> None:
        super().__init__()
        self.code = code
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self, x)


def linear(out: int = 6, into: int = 6) -> nn.Linear:
    return nn.Linear(into, out, bias=False)


def vector(n: int = 6) -> nn.Parameter:
    return nn.Parameter(torch.rand(n) + 0.5)


def conv(kernel: int = 1, out: int = 4, into: int = 4, bias: bool = False, **options: int) -> nn.Conv2d:
    return nn.Conv2d(into, out, kernel, bias=bias, **options)


def normed(*parts: nn.Module) -> nn.Sequential:
    norm = nn.BatchNorm2d(4)
    nn.init.uniform_(norm.running_mean)
    nn.init.uniform_(norm.running_var, 0.5, 2)
    return nn.Sequential(*parts, norm)


DENSE = {
    "two matrices": (lambda: Sum(linear(), linear()), {"parts.0.weight", "parts.1.weight"}, 36),
    "two matrices with biases": (
        lambda: Sum(nn.Linear(6, 6), nn.Linear(6, 6)),
        {"parts.0.weight", "parts.1.weight"},
        36,
    ),
    "a low-rank update": (
        lambda: Function(lambda s, x: s.w(x) + 2 * s.b(s.a(x)), w=nn.Linear(6, 6), a=linear(2), b=linear(6, 2)),
        {"a.weight", "b.weight"},
        24,
    ),
    "an update of rank one": (
        lambda: Function(lambda s, x: s.w(x) - s.b(s.a(x)) / 3, w=linear(), a=linear(1), b=linear(6, 1)),
        {"a.weight", "b.weight"},
        12,
    ),
    "a factor per channel": (lambda: Function(lambda s, x: s.w(x) + x * s.g, w=linear(), g=vector()), {"g"}, 6),
    "one factor": (lambda: Function(lambda s, x: s.g * x + s.w(x), w=linear(), g=vector(1)), {"g"}, 1),
    "a factor behind the weight": (
        lambda: Function(lambda s, x: s.w(x) * s.h + s.b(s.a(x)), w=linear(), h=vector(), a=linear(2), b=linear(6, 2)),
        {"a.weight", "b.weight"},
        24,
    ),
    "a bias inside, and one in the sum": (
        lambda: Function(lambda s, x: s.w(x) + s.b(s.a(x)), w=nn.Linear(6, 6), a=nn.Linear(6, 2), b=linear(6, 2)),
        {"a.weight", "b.weight"},
        24,
    ),
    "a fused weight": (
        lambda: Function(lambda s, x: s.w(x).chunk(2, -1)[0] + s.g * x, w=linear(12), g=vector()),
        set(),
        0,
    ),
}


def inner(names: set[str]) -> set[str]:
    return {f"inner.{name}" for name in names}


def folded(result) -> set[str]:
    return {f.parameter for f in result.audit.findings if f.code == "DW020"}


@pytest.mark.parametrize("case", [name for name in DENSE if name != "a fused weight"])
def test_linear_maps_of_one_value_fold_into_a_full_weight(examine, case: str) -> None:
    make, names, dof = DENSE[case]
    result = examine(Mixed(make()), X, complete=True)
    assert result.dof("DW020") == dof
    assert folded(result) <= inner(names)


SILENT = {
    "another value": Function(lambda s, x: s.w(x) + s.v(torch.tanh(x)), w=linear(), v=linear()),
    "an activation between": Function(
        lambda s, x: s.w(x) + s.b(torch.tanh(s.a(x))), w=linear(), a=linear(2), b=linear(6, 2)
    ),
    "the value itself": Function(lambda s, x: s.w(x) + x, w=linear()),
    "a weight that is read twice": Function(lambda s, x: s.w(x) + s.g * x + s.w(x.flip(-2)), w=linear(), g=vector()),
    "a map that is read twice": Function(lambda s, x: (y := s.g * x) + s.w(x) + y.tanh(), w=linear(), g=vector()),
    "a factor that depends on the position": Function(
        lambda s, x: s.w(x) * s.h.view(-1, 1) + s.g * x, w=linear(), h=vector(4), g=vector()
    ),
    "a mask behind the weight": Function(
        lambda s, x: s.w(x) * s.m + s.g * x, w=linear(), m=torch.tensor([1.0, 0, 1, 1, 0, 1]), g=vector()
    ),
    "a masked weight": Function(
        lambda s, x: F.linear(x, torch.where(s.m > 0, s.w.weight, 0.3)) + s.g * x,
        w=linear(),
        m=torch.eye(6).roll(1, 0),
        g=vector(),
    ),
    "a guest of larger shape": Function(lambda s, x: s.w(x) + s.g * x, w=linear(1), g=vector()),
    "data as a factor": Function(lambda s, x: s.w(x) + x * x.mean(-1, keepdim=True) * s.g, w=linear(), g=vector()),
    "positions mixed": Function(lambda s, x: s.w(x) + s.g * x.cumsum(1), w=linear(), g=vector()),
}


@pytest.mark.parametrize("case", SILENT)
def test_it_is_silent_where_the_weight_cannot_undo_it(examine, case: str) -> None:
    assert examine(Mixed(SILENT[case]), X).dof("DW020") == 0


def test_a_bias_inside_without_one_in_the_sum_leaves_what_multiplies_it(examine) -> None:
    chain = Function(lambda s, x: s.w(x) + s.b(s.a(x)), w=linear(), a=nn.Linear(6, 2), b=linear(6, 2))
    result = examine(Mixed(chain), X)
    assert folded(result) == {"inner.a.weight"}


def test_a_fused_weight_that_is_sliced_is_left_alone(examine) -> None:
    make, _, dof = DENSE["a fused weight"]
    assert examine(Mixed(make()), X).dof("DW020") in (dof, 6)  # 6 if the slice is a parameter of its own


IMAGES = {
    "1 × 1 beside 3 × 3": (lambda: Sum(conv(3, padding=1), conv()), 16),
    "RepVGG": (lambda: Sum(normed(conv(3, padding=1)), normed(conv()), normed()), 16 + 4 + 4),
    "dilated taps": (lambda: Sum(conv(5, padding=2), conv(3, padding=2, dilation=2)), 144),
    "one row of taps": (lambda: Sum(conv(3, padding=1), nn.Conv2d(4, 4, (1, 3), padding=(0, 1), bias=False)), 48),
    "strides": (lambda: Sum(conv(3, padding=1, stride=2), conv(stride=2)), 16),
    "in groups": (lambda: Sum(conv(3, padding=1, groups=2), conv(groups=2)), 8),
    "a chain": (lambda: Sum(conv(3, padding=1), nn.Sequential(conv(1, 2), conv(3, 4, 2, padding=1))), 8 + 72),
}


@pytest.mark.parametrize("case", IMAGES)
def test_convolutions_fold_into_one_whose_taps_cover_theirs(examine, case: str) -> None:
    make, dof = IMAGES[case]
    result = examine(Imaged(make()), IMAGE, complete=True)
    assert result.dof("DW020") == dof


STAY = {
    "taps that the window lacks": Sum(conv(3, padding=1), conv(3, padding=2, dilation=2)),
    "other places": Sum(conv(3, padding=2, dilation=2), conv(2, padding=1, dilation=2)),
    "fewer groups than the host's": Sum(conv(3, padding=1, groups=4), conv(groups=2)),
    "zeros around a constant": Sum(
        conv(3, padding=1, bias=True), nn.Sequential(conv(1, bias=True), conv(3, padding=1, groups=4))
    ),
    "padding with the border": Sum(
        conv(3, padding=1), nn.Conv2d(4, 4, 3, padding=1, bias=False, padding_mode="replicate")
    ),
}


@pytest.mark.parametrize("case", STAY)
def test_other_convolutions_stay(examine, case: str) -> None:
    inner = STAY[case]
    try:
        inner(torch.randn(1, 4, 7, 7))
    except RuntimeError:
        pytest.skip("the shapes do not add up")
    assert examine(Imaged(inner), IMAGE).dof("DW020") == 0


def test_a_table_takes_over_any_function_of_its_index(examine) -> None:
    code = lambda s, w: s.table(w) + s.norm(s.up(torch.tanh(s.small(w))))  # noqa: E731
    parts = {"table": nn.Embedding(11, 4), "small": nn.Embedding(11, 3), "up": linear(4, 3), "norm": nn.RMSNorm(4)}
    result = examine(Worded(Function(code, **parts)), WORDS, complete=True)
    assert folded(result) == inner({"small.weight", "up.weight", "norm.weight"})
    assert result.dof("DW020") == 33 + 12 + 4


WORDED = {
    "another index": Function(
        lambda s, w: s.table(w) + s.up(s.small(w.flip(1))),
        table=nn.Embedding(11, 4),
        small=nn.Embedding(11, 3),
        up=linear(4, 3),
    ),
    "positions mixed": Function(
        lambda s, w: s.table(w) + s.up(s.small(w).cumsum(1)),
        table=nn.Embedding(11, 4),
        small=nn.Embedding(11, 3),
        up=linear(4, 3),
    ),
    "a norm over positions": Function(
        lambda s, w: s.table(w) + F.layer_norm(s.up(s.small(w)), (5, 4)),
        table=nn.Embedding(11, 4),
        small=nn.Embedding(11, 3),
        up=linear(4, 3),
    ),
    "a table that is read elsewhere": Function(
        lambda s, w: s.table(w) + s.up(s.small(w)) * s.table(w.flip(1)),
        table=nn.Embedding(11, 4),
        small=nn.Embedding(11, 3),
        up=linear(4, 3),
    ),
    "a factor per position": Function(
        lambda s, w: s.table(w) + s.up(s.small(w)) * s.g.view(-1, 1),
        table=nn.Embedding(11, 4),
        small=nn.Embedding(11, 3),
        up=linear(4, 3),
        g=vector(5),
    ),
}


@pytest.mark.parametrize("case", WORDED)
def test_a_table_takes_over_nothing_else(examine, case: str) -> None:
    assert examine(Worded(WORDED[case]), WORDS).dof("DW020") == 0


def test_a_parameter_that_is_used_elsewhere_stays_and_the_others_fold(examine) -> None:
    code = lambda s, x: s.w(x) + s.b(s.a(x)) + torch.tanh(s.a(x)).sum(-1, keepdim=True) * x.square()  # noqa: E731
    result = examine(Mixed(Function(code, w=linear(), a=linear(2), b=linear(6, 2))), X)
    assert folded(result) == {"inner.b.weight"}


def test_dropout_in_training_keeps_them_apart(examine) -> None:
    code = lambda s, x: s.w(x) + s.b(F.dropout(s.a(x), 0.5, s.training))  # noqa: E731
    module = Mixed(Function(code, w=linear(), a=linear(2), b=linear(6, 2)))
    assert examine(module, X).dof("DW020") == 24
    assert examine(module.train(), X, training=True).dof("DW020") == 0
