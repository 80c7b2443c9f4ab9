"""Random modules: a few operations in a row, on values that came before, with parameters of their own or shared."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, LENGTH, WIDTH = 2, 3, 4
SHAPE = (BATCH, LENGTH, WIDTH)


class Program(nn.Module):
    """The operations that a seed picks; its parameters are made in a first run."""

    def __init__(self, seed: int, length: int) -> None:
        super().__init__()
        drawn = random.Random(seed)
        names = [drawn.choice(list(OPERATIONS)) for _ in range(length)]
        self.steps = [(name, *(drawn.randrange(1 << 16) for _ in range(3))) for name in names]
        self.own, self.place, self.chosen = nn.ParameterDict(), 0, 0
        self.several = drawn.random() < 0.3
        self(*inputs(torch.Generator().manual_seed(seed)))

    def forward(self, x: Tensor, tokens: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        values, self.tokens, self.mask = [x], tokens, mask
        for place, (name, first, second, chosen) in enumerate(self.steps):
            self.place, self.chosen = place, chosen
            recent = values[-1 - first % min(len(values), 3)]
            values.append(OPERATIONS[name](self, recent, values[-1 - second % len(values)]))
        return tuple(values[-2:]) if self.several and len(values) > 2 else (values[-1],)

    def parameter(self, name: str, *shape: int) -> Tensor:
        key = f"{self.place:02}{name}"
        if key not in self.own:
            self.own[key] = nn.Parameter(0.7 * torch.randn(shape, dtype=torch.float64))
        return self.own[key]

    def earlier(self, *shape: int) -> Tensor:
        """A parameter of an earlier step, where there is one."""
        known = [p for key, p in self.own.items() if p.shape == shape and int(key[:2]) < self.place]
        return known[self.chosen % len(known)] if known else self.parameter(f"w{len(shape)}", *shape)

    def one_of(self, *ways: Callable[[], Tensor]) -> Tensor:
        return ways[self.chosen % len(ways)]()

    def linear(self, x: Tensor, name: str = "w", out: int = WIDTH, *, bias: bool | None = None) -> Tensor:
        bias = bool(self.chosen & 1) if bias is None else bias
        return F.linear(x, self.parameter(name, out, x.shape[-1]), self.parameter(name + "b", out) if bias else None)


def inputs(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    tokens = torch.randint(0, LENGTH, (BATCH, LENGTH), generator=generator)
    return x, tokens, torch.rand(SHAPE, generator=generator) > 0.5


Operation = Callable[[Program, Tensor, Tensor], Tensor]
OPERATIONS: dict[str, Operation] = {}


def operation(function: Operation) -> Operation:
    OPERATIONS[function.__name__] = function
    return function


@operation
def linear(m: Program, x: Tensor, _: Tensor) -> Tensor:
    return m.linear(x)


@operation
def shared(m: Program, x: Tensor, _: Tensor) -> Tensor:
    weight, vector = m.earlier(WIDTH, WIDTH), m.earlier(WIDTH)
    return m.one_of(lambda: x @ weight, lambda: F.linear(x, weight), lambda: x + vector, lambda: x * vector)


@operation
def pointwise(m: Program, x: Tensor, y: Tensor) -> Tensor:
    functions = [torch.relu, F.gelu, torch.tanh, torch.sigmoid, torch.abs, torch.square, torch.neg, F.leaky_relu]
    return functions[m.chosen % len(functions)](x)


@operation
def arithmetic(m: Program, x: Tensor, y: Tensor) -> Tensor:
    return m.one_of(lambda: x + y, lambda: x - y, lambda: x * y, lambda: x * 2.5 + 1, lambda: x / 3 - y)


@operation
def gate(m: Program, x: Tensor, y: Tensor) -> Tensor:
    return m.one_of(lambda: x * torch.sigmoid(y), lambda: torch.relu(x) * y, lambda: torch.relu(x) ** 2, lambda: x * x)


@operation
def affine(m: Program, x: Tensor, y: Tensor) -> Tensor:
    gain, number = m.parameter("g", WIDTH), m.parameter("s", 1)
    return m.one_of(lambda: x * gain, lambda: x + gain, lambda: x * number.exp(), lambda: x + number * y)


@operation
def norm(m: Program, x: Tensor, _: Tensor) -> Tensor:
    gain, shift = m.parameter("g", WIDTH), m.parameter("b", WIDTH)
    return m.one_of(
        lambda: F.layer_norm(x, (WIDTH,), gain, shift),
        lambda: F.layer_norm(x, (WIDTH,), gain),
        lambda: F.rms_norm(x, (WIDTH,), gain, eps=1e-6),
        lambda: F.normalize(x, dim=-1) + shift,
        lambda: F.group_norm(x.mT, 2, gain, shift).mT,
        lambda: F.instance_norm(x.mT, weight=gain, bias=shift).mT,
    )


@operation
def statistics(m: Program, x: Tensor, y: Tensor) -> Tensor:
    return m.one_of(
        lambda: x - x.mean(-1, keepdim=True),
        lambda: x.mean(1, keepdim=True) + y,
        lambda: x - x.amax(-1, keepdim=True),
        lambda: x.softmax(-1) * y,
        lambda: x.log_softmax(1),
        lambda: x.cumsum(1),
        lambda: x.sort(-1)[0],
    )


@operation
def masked(m: Program, x: Tensor, y: Tensor) -> Tensor:
    mask = m.mask if m.chosen & 8 else m.mask[..., :1]
    return m.one_of(
        lambda: torch.where(mask, x, y),
        lambda: torch.where(mask, x, 0.0),
        lambda: torch.where(mask, 0.0, x),
        lambda: x.masked_fill(mask, 0.0),
        lambda: x * mask,
        lambda: torch.where(mask, x, 0.0) - y.masked_fill(mask, 0.0),
    )


@operation
def moved(m: Program, x: Tensor, y: Tensor) -> Tensor:
    return m.one_of(
        lambda: torch.cat([x[..., :2], y[..., 2:]], -1),
        lambda: torch.cat([x[..., :2], -x[..., :2]], -1),
        lambda: torch.cat([x[:, :1], y[:, 1:]], 1),
        lambda: x.flip(-1),
        lambda: x.roll(1, 1),
        lambda: x.unflatten(-1, (2, 2)).mT.flatten(-2),
        lambda: x[:, m.tokens[0]],
        lambda: x.index_select(2, torch.tensor([1, 1, 0, 3])),
    )


@operation
def table(m: Program, x: Tensor, _: Tensor) -> Tensor:
    rows = F.embedding(m.tokens, m.parameter("t", LENGTH, WIDTH))
    return m.one_of(lambda: x + rows, lambda: rows, lambda: x + m.parameter("p", LENGTH, WIDTH))


@operation
def attention(m: Program, x: Tensor, y: Tensor) -> Tensor:
    sources = {"q": x, "k": y if m.chosen & 4 else x, "v": x}
    q, k, v = (m.linear(z, name, bias=True).unflatten(-1, (2, 2)).transpose(1, 2) for name, z in sources.items())
    keys = m.mask[:, None, :, :LENGTH] | torch.eye(LENGTH, dtype=torch.bool)
    sums = m.one_of(
        lambda: F.scaled_dot_product_attention(q, k, v),
        lambda: F.scaled_dot_product_attention(q, k, v, keys),
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda: (q @ k.mT).masked_fill(~keys, -1e30).softmax(-1) @ v,
        lambda: torch.sigmoid(q @ k.mT) @ v,
    )
    return m.linear(sums.transpose(1, 2).flatten(-2), "o")


@operation
def fused(m: Program, x: Tensor, _: Tensor) -> Tensor:
    a, b = m.linear(x, out=2 * WIDTH).chunk(2, -1)
    return m.one_of(lambda: a * torch.relu(b), lambda: a + b, lambda: a * b, lambda: F.silu(a) * b)


@operation
def convolution(m: Program, x: Tensor, _: Tensor) -> Tensor:
    groups = (1, 2, 4)[m.chosen % 3]
    return F.conv1d(x.mT, m.parameter("c", WIDTH, WIDTH // groups, 3), m.parameter("b", WIDTH), 1, 1, 1, groups).mT


@operation
def normalised_weight(m: Program, x: Tensor, _: Tensor) -> Tensor:
    w: Any = m.parameter("w", WIDTH, WIDTH)
    return F.linear(x, m.one_of(lambda: w / w.norm(), lambda: w / w.norm(dim=1, keepdim=True), lambda: w.softmax(1)))
