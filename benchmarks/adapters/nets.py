"""A small convolutional net with BatchNorm, for tools that are about those."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn


def small_net() -> nn.Sequential:
    """Three convolutions with BatchNorm, one of them without a bias, and a linear head."""
    return nn.Sequential(
        OrderedDict(
            conv0=nn.Conv2d(3, 16, 3, padding=1),
            norm0=nn.BatchNorm2d(16),
            act0=nn.ReLU(),
            conv1=nn.Conv2d(16, 32, 3, stride=2, bias=False),
            norm1=nn.BatchNorm2d(32),
            act1=nn.ReLU(),
            conv2=nn.Conv2d(32, 32, 3, groups=4),
            norm2=nn.BatchNorm2d(32),
            act2=nn.GELU(),
            pool=nn.AdaptiveAvgPool2d(1),
            flat=nn.Flatten(),
            head=nn.Linear(32, 10),
        )
    )
