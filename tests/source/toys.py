"""What a user's own package may hold."""

import torch
from torch import nn

calls = 3


def linear_with_tensor() -> tuple[nn.Module, torch.Tensor]:
    return nn.Linear(4, 2), torch.randn(3, 4)


def linear_with_tuple() -> tuple[nn.Module, tuple]:
    return nn.Linear(4, 2), (torch.randn(3, 4),)


def linear_with_keywords() -> tuple[nn.Module, dict]:
    return nn.Linear(4, 2), {"input": torch.randn(3, 4)}


def alone() -> nn.Module:
    return nn.Bilinear(4, 3, 2)


def nothing() -> None:
    return None


def three() -> tuple[int, int, int]:
    return 1, 2, 3


def broken() -> nn.Module:
    raise RuntimeError("the disk\nis \x1b[31mfull")


def large() -> tuple[nn.Module, torch.Tensor]:
    return nn.Linear(200, 200), torch.randn(1, 200)
