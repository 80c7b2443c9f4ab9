"""What a user's own package may hold."""

import warnings

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


async def coming() -> nn.Module:
    return nn.Linear(4, 2)


def scripted_inside() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 2)), torch.randn(3, 4)


def quantised() -> tuple[nn.Module, torch.Tensor]:
    plain = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces that torchao will replace this
        return torch.ao.quantization.quantize_dynamic(plain, {nn.Linear}), torch.randn(3, 4)


def no_forward() -> nn.Module:
    return nn.ModuleList([nn.Linear(4, 2)])


def three() -> tuple[int, int, int]:
    return 1, 2, 3


def broken() -> nn.Module:
    raise RuntimeError("the disk\nis \x1b[31mfull")


def large() -> tuple[nn.Module, torch.Tensor]:
    return nn.Linear(200, 200), torch.randn(1, 200)


class Picture(nn.Module):
    """Patches of a picture with learned positions: only pictures of 16 × 16 fit."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.positions = nn.Conv2d(3, 8, 4, 4), nn.Parameter(torch.randn(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.patch(x).flatten(2).mT + self.positions


class Fixed(Picture):
    """Only pictures of 20 × 20 fit."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(25, 8))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o((self.q(x) @ self.k(x).mT).softmax(-1) @ self.v(x))
