"""Transposed convolutions, as generators and U-Nets use them: biases before statistics, and scales of hidden units."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import deadweight

WIDTH = 4
X = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0))


def generator(norm: nn.Module, activation: nn.Module, groups: int = 1) -> nn.Module:
    up = nn.ConvTranspose2d(3, WIDTH, 3, stride=2, output_padding=1, padding=1)
    return nn.Sequential(up, norm, activation, nn.ConvTranspose2d(WIDTH, 2, 2, stride=2, groups=groups), nn.Tanh())


def test_a_bias_before_statistics_is_dead(examine) -> None:
    assert examine(generator(nn.InstanceNorm2d(WIDTH), nn.ReLU()), X).dof("DW004") == WIDTH
    assert examine(generator(nn.BatchNorm2d(WIDTH), nn.ReLU()), X, training=True).dof("DW004") == WIDTH
    assert examine(generator(nn.Identity(), nn.ReLU()), X).dof("DW004") == 0


def test_the_scale_of_a_hidden_channel_is_free_behind_relu_alone(examine) -> None:
    assert examine(generator(nn.Identity(), nn.ReLU()), X, complete=True).dof("DW011") == WIDTH
    assert examine(generator(nn.Identity(), nn.GELU()), X).dof("DW011") == 0


def test_kernels_in_groups_are_left_alone(examine) -> None:
    assert examine(generator(nn.Identity(), nn.ReLU(), groups=2), X).dof("DW011") == 0


def test_everything_is_explained(examine) -> None:
    for norm in (nn.Identity(), nn.InstanceNorm2d(WIDTH)):
        count = examine(generator(norm, nn.ReLU()), X, complete=True).audit.completeness
        assert count.explained == count.measured


def test_the_reduced_generator_is_the_same_function() -> None:
    module = generator(nn.BatchNorm2d(WIDTH), nn.ReLU()).double().eval()
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.normal_(part.weight), nn.init.normal_(part.bias), nn.init.normal_(part.running_mean)
    reduced = deadweight.reduce(module, inputs=(X.double(),)).module
    assert reduced is not None
    x: Tensor = torch.randn(2, 3, 2, 2, dtype=torch.float64)
    assert float((reduced(x) - module(x)).abs().max()) < 1e-12  # outputs of order one, a few roundings of 1e-16
