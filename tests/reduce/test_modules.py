"""Modules of the user's own: reduced in memory, and written and loaded into a fresh original."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import deadweight
from deadweight.errors import DeadweightError


def statistics(module: nn.Module) -> nn.Module:
    """BatchNorms that have seen something, gains and shifts that do something."""
    torch.manual_seed(0)
    for m in module.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            m.running_mean, m.running_var = torch.randn(m.num_features), torch.rand(m.num_features) + 0.5
            nn.init.normal_(m.weight, 1.0, 0.3)
            nn.init.normal_(m.bias)
    return module.eval()


def convolutions() -> nn.Module:
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1, bias=False), nn.BatchNorm2d(2)]
    return statistics(nn.Sequential(*layers, nn.Flatten(), nn.Linear(72, 5), nn.BatchNorm1d(5)))


def test_batchnorm_goes_into_the_convolution_before_it() -> None:
    model, x = convolutions(), torch.randn(4, 3, 8, 8)
    result = deadweight.reduce(model, inputs=(x,))
    small = result.module
    assert small is not None and not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in small.modules())
    assert torch.allclose(small(x), model(x), atol=1e-5)
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters())


def test_batchnorm_whose_input_is_read_again_stays() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            return torch.tanh(self.norm(y)) + torch.sin(y)

    result = deadweight.reduce(statistics(Twice()), inputs=(torch.randn(2, 3, 8, 8),))
    assert not result.steps


def test_a_callable_with_other_weights_at_every_call_is_compared_with_the_weights_that_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "source")
    result = deadweight.reduce("toys:Attention", tmp_path / "out", inputs="2x5x8", layout="stock")
    (error,) = result.verification.errors
    assert error.floor < 1e-6, "float32 has a noise of 1e-7; two random models would differ by 1"
    assert error.own < 1e-6 and {s.code for s in result.steps} == {"DW002", "DW003"}


def test_a_folder_made_from_a_module_says_how_it_is_loaded(tmp_path: Path) -> None:
    deadweight.reduce(convolutions(), tmp_path / "out", inputs=torch.randn(4, 3, 8, 8))
    with pytest.raises(DeadweightError, match=r"made from a module, .*deadweight.load\(folder, module\)"):
        deadweight.audit(tmp_path / "out")


def test_a_reduced_module_is_loaded_into_a_fresh_original(tmp_path: Path) -> None:
    model, x = convolutions(), torch.randn(4, 3, 8, 8)
    deadweight.reduce(model, tmp_path / "out", inputs=(x,))
    again = deadweight.load(tmp_path / "out", convolutions())
    assert torch.allclose(again(x), model(x), atol=1e-5)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert "1.running_mean" not in stored and "0.bias" in stored


@pytest.mark.parametrize("norm_first", [True, False])
def test_torchs_own_encoder_is_reduced(norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 12, 0.0, "gelu", batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p, float(p.ndim == 1), 0.4)
    x = torch.randn(1, 5, 8)
    result = deadweight.reduce(model, inputs=(x,), layout="stock")
    assert result.module is not None and result.steps
    assert torch.allclose(result.module(x), model(x), atol=1e-5)
    assert not result.module.layers[0].self_attn.in_proj_bias[8:16].any(), "the key bias is dead"
    assert result.module.layers[0].self_attn.in_proj_bias[:8].any(), "the query bias is not"


@pytest.mark.parametrize("norm_first", [True, False])
def test_torchs_own_encoder_is_made_smaller_without_its_fused_kernel(norm_first: bool, tmp_path: Path) -> None:
    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        layer = nn.TransformerEncoderLayer(8, 2, 12, 0.0, "gelu", batch_first=True, norm_first=norm_first)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first)
        for p in model.parameters():
            nn.init.normal_(p, float(p.ndim == 1), 0.4)
        return model.eval()

    model, x, padded = build(0), torch.randn(3, 5, 8), torch.tensor([[False] * 5, [False] * 4 + [True]] * 2)[:3]
    result = deadweight.reduce(model, tmp_path / "out", inputs=(x,))
    assert ("DW006" if norm_first else "DW007") in {s.code for s in result.steps}, "shifts of norms are gone"
    small = deadweight.load(tmp_path / "out", build(1))
    with torch.no_grad():  # where torch would use its kernel
        assert torch.allclose(small(x), model(x), atol=1e-5)
        both = [m(x, src_key_padding_mask=padded)[~padded] for m in (small, model)]
    assert torch.allclose(*both, atol=1e-5)


class NoNorm(nn.Module):
    """One layer, one head, no norm, both skips: the case in which a whole query matrix may become the identity."""

    def __init__(self, d: int = 6) -> None:
        super().__init__()
        self.table, self.readout = nn.Embedding(9, d), nn.Linear(d, 9)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(d, 12), nn.Linear(12, d)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        p = torch.softmax(self.q(x) @ self.k(x).transpose(-1, -2), -1)
        x = x + self.o(p @ self.v(x))
        return self.readout(x + self.down(torch.tanh(self.up(x))))


def test_a_whole_projection_becomes_the_identity_where_no_norm_forbids_it() -> None:
    torch.manual_seed(0)
    model, ids = NoNorm().eval(), torch.randint(0, 9, (2, 7))
    result = deadweight.reduce(model, inputs=(ids,), select=["DW015"])
    assert [s.code for s in result.steps] == ["DW015"] and result.module is not None
    assert torch.allclose(result.module(ids), model(ids), atol=1e-4)
    before, after = (sum(p.numel() for p in m.parameters()) for m in (model, result.module))
    assert before - after == 36


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("inplace", [True, False])
def test_batchnorm_goes_also_where_an_activation_works_in_place(inplace: bool, dtype: torch.dtype) -> None:
    """With in-place operations torch.export writes another kind of batch norm."""
    layers = [nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace), nn.Conv2d(4, 2, 1)]
    model, x = statistics(nn.Sequential(*layers)).to(dtype), torch.randn(2, 3, 8, 8, dtype=dtype)
    result = deadweight.reduce(model, inputs=(x,))
    assert result.module is not None and not any(isinstance(m, nn.BatchNorm2d) for m in result.module.modules())
    assert torch.allclose(result.module(x), model(x), atol=1e-5)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_batchnorm_goes_into_a_convolution_in_groups(groups: int) -> None:
    model = statistics(nn.Sequential(nn.Conv2d(4, 8, 3, groups=groups), nn.BatchNorm2d(8), nn.ReLU()))
    x = torch.randn(2, 4, 8, 8)
    result = deadweight.reduce(model, inputs=(x,))
    assert result.module is not None and torch.allclose(result.module(x), model(x), atol=1e-5)
    assert result.parameters_after == sum(p.numel() for p in model[0].parameters())


def test_batchnorm_behind_a_transposed_convolution_stays() -> None:
    model = statistics(nn.Sequential(nn.ConvTranspose2d(4, 8, 3, groups=2), nn.BatchNorm2d(8), nn.ReLU()))
    x = torch.randn(2, 4, 8, 8)
    result = deadweight.reduce(model, inputs=(x,), select=["DW004"])
    assert result.module is not None and torch.allclose(result.module(x), model(x), atol=1e-5)
    assert isinstance(result.module[1], nn.BatchNorm2d)


class InvertedResidual(nn.Module):
    """Two maps of one place, each with a BatchNorm, as in MobileNetV2: linear at its end."""

    def __init__(self, d_in: int, d_hidden: int, d_out: int) -> None:
        super().__init__()
        self.wide, self.wide_norm = nn.Conv2d(d_in, d_hidden, 1, bias=False), nn.BatchNorm2d(d_hidden)
        self.narrow, self.narrow_norm = nn.Conv2d(d_hidden, d_out, 1, bias=False), nn.BatchNorm2d(d_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow_norm(self.narrow(torch.relu(self.wide_norm(self.wide(x)))))


def test_the_bias_into_which_the_statistics_of_a_batch_norm_fold_stays() -> None:
    """The bias of the first block would fold into the second; but then its statistics could not be written into it."""
    net = statistics(nn.Sequential(InvertedResidual(3, 4, 4), InvertedResidual(4, 6, 4)))
    x = torch.randn(2, 3, 4, 4)
    result = deadweight.reduce(net, inputs=(x,))
    assert result.module is not None and torch.allclose(result.module(x), net(x), atol=1e-5)
