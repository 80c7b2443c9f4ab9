"""Parameters that are tied, modules that are used twice or hooked: the same function, and numbers that add up."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import deadweight
from deadweight.errors import DeadweightError


class Block(nn.Module):
    """Pre-norm attention with two heads."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(-1, (2, -1)).transpose(-2, -3) for layer in (self.q, self.k, self.v))
        mixed = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        return x + self.o(mixed.transpose(-2, -3).flatten(-2))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.second(self.first(x))))


def keys_and_queries(net: Net) -> None:
    net.first.k.weight = net.first.q.weight


def values_and_outputs(net: Net) -> None:
    net.first.o.weight = net.first.v.weight


def key_and_query_bias(net: Net) -> None:
    net.first.k.bias = net.first.q.bias


def key_biases_of_two_layers(net: Net) -> None:
    net.second.k.bias = net.first.k.bias


def gains_of_two_layers(net: Net) -> None:
    net.second.norm.weight = net.first.norm.weight


def one_key_layer_for_both(net: Net) -> None:
    net.second.k = net.first.k


def one_norm_for_both(net: Net) -> None:
    net.second.norm = net.first.norm


def one_block_for_both(net: Net) -> None:
    net.second = net.first


def nothing(net: Net) -> None:
    """The neighbour without ties."""


def random_net(tie: Callable[[Net], None], seed: int = 0) -> Net:
    net = Net()
    tie(net)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.4 + float(p.ndim == 1))
    return net.eval()


TIES = [
    nothing,
    keys_and_queries,
    values_and_outputs,
    key_and_query_bias,
    key_biases_of_two_layers,
    gains_of_two_layers,
    one_key_layer_for_both,
    one_norm_for_both,
    one_block_for_both,
]


@pytest.mark.parametrize("tie", TIES, ids=lambda t: t.__name__)
def test_what_is_tied_stays_tied_and_is_counted_once(tie: Callable[[Net], None], tmp_path: Path) -> None:
    net, x = random_net(tie), torch.randn(2, 5, 8)
    result = deadweight.reduce(net, tmp_path / "out", inputs=(x,))
    again = deadweight.load(tmp_path / "out", random_net(tie, seed=1))
    assert torch.allclose(again(x), net(x), atol=1e-5)
    stored = sum(t.numel() for t in load_file(tmp_path / "out" / "model.safetensors").values() if t.is_floating_point())
    assert stored == result.parameters_after == sum(p.numel() for p in again.parameters()) < result.parameters_before
    assert stored == result.parameters_before - sum(s.saves for s in result.steps), "no tie was cut open on the way"


@pytest.mark.parametrize("tie", [nothing, keys_and_queries, one_key_layer_for_both], ids=lambda t: t.__name__)
def test_a_module_in_memory_is_counted_by_what_it_holds(tie: Callable[[Net], None]) -> None:
    net, x = random_net(tie), torch.randn(2, 5, 8)
    result = deadweight.reduce(net, inputs=(x,))
    assert result.module is not None and torch.allclose(result.module(x), net(x), atol=1e-5)
    assert result.parameters_after == sum(p.numel() for p in result.module.parameters())


@pytest.mark.parametrize("frozen", [True, False])
def test_what_is_frozen_stays_frozen(frozen: bool) -> None:
    net = random_net(nothing).requires_grad_(not frozen)
    result = deadweight.reduce(net, inputs=(torch.randn(2, 5, 8),))
    assert result.module is not None and {p.requires_grad for p in result.module.parameters()} == {not frozen}


def test_a_layer_with_a_hook_stays_and_its_neighbour_shrinks() -> None:
    net, x = random_net(nothing), torch.randn(2, 5, 8)
    net.first.v.register_forward_hook(lambda module, args, output: output * 2)
    result = deadweight.reduce(net, inputs=(x,))
    assert result.module is not None and torch.allclose(result.module(x), net(x), atol=1e-5)
    assert result.module.first.v.weight.shape == (8, 8) and type(result.module.first.v) is nn.Linear
    assert type(result.module.second.v) is not nn.Linear
    assert any("hooks" in s.why for s in result.skipped if s.parameter == "first.v.weight")


def test_old_style_weight_norm_is_left_as_it_is() -> None:
    net, x = random_net(nothing), torch.randn(2, 5, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(net.first.v)
    net.first.v.weight = net.first.v.weight.detach()  # as after a forward without gradients
    result = deadweight.reduce(net, inputs=(x,))
    assert result.module is not None and torch.allclose(result.module(x), net(x), atol=1e-5)


class Uncopied(Net):
    def __deepcopy__(self, memo: dict) -> Uncopied:
        raise RuntimeError("there can be only one")


def test_a_module_that_cannot_be_copied_is_refused_in_one_line() -> None:
    with pytest.raises(DeadweightError, match=r"cannot be copied.*only one.*expected"):
        deadweight.reduce(Uncopied().eval(), inputs=(torch.randn(2, 5, 8),))


class Peeping(Net):
    """A module whose own code reads the bias of a layer."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.first.k.bias.sum()


def test_code_that_reads_a_removed_parameter_is_pointed_to_the_stock_layout() -> None:
    net, x = Peeping().eval(), torch.randn(2, 5, 8)
    with pytest.raises(DeadweightError, match="layout='stock'"):
        deadweight.reduce(net, inputs=(x,))
    result = deadweight.reduce(net, inputs=(x,), layout="stock")
    assert result.module is not None and torch.allclose(result.module(x), net(x), atol=1e-5)


def test_running_a_model_leaves_its_renormed_table_alone() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.norm, self.head = nn.Embedding(7, 8, max_norm=0.5), nn.LayerNorm(8), nn.Linear(8, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.norm(self.table(ids)))

    net = Table().eval()
    before = net.table.weight.detach().clone()
    deadweight.reduce(net, inputs=(torch.randint(0, 7, (2, 5)),))
    assert torch.equal(net.table.weight, before)
