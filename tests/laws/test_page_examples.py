"""The examples on the law pages are run: each must leave the function as it was, and must really change weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace as Names
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import Tensor, nn  # noqa: E402
from torch.nn.functional import layer_norm, silu  # noqa: E402

from deadweight.laws.page import find_page  # noqa: E402

d, n = 6, 5
Function = Callable[[], Tensor]
EXACT = 1e-9  # float64 rounding through inverses of random 6 × 6 matrices


def linear(n_in: int, n_out: int) -> nn.Linear:
    return nn.Linear(n_in, n_out).double()


def norm() -> nn.LayerNorm:
    module = nn.LayerNorm(d).double()
    nn.init.normal_(module.weight)
    nn.init.normal_(module.bias)
    return module


def table(rows: int) -> nn.Embedding:
    return nn.Embedding(rows, d).double()


def inputs() -> Tensor:
    return torch.randn(n, d, dtype=torch.float64)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.T, dim=-1) @ v


def heads() -> dict[str, nn.Linear]:
    return {name: linear(d, d) for name in "qkvo"}


def attention(h: dict[str, nn.Linear], x: Tensor) -> Tensor:
    return h["o"](attend(h["q"](x), h["k"](x), h["v"](x)))


def value_bias() -> tuple[dict, Function]:
    h, x = heads(), inputs()
    return {"attn": Names(**h)}, lambda: attention(h, x)


def mean_before_layernorm() -> tuple[dict, Function]:
    fc2, x, skip = linear(d, d), inputs(), inputs()
    return {"block": Names(mlp=Names(fc2=fc2))}, lambda: layer_norm(skip + fc2(x), (d,))


def norm_affine() -> tuple[dict, Function]:
    h, x, ln = heads(), inputs(), norm()
    return {"attn": Names(**h), "norm": ln}, lambda: attention(h, ln(x))


def post_norm_shift() -> tuple[dict, Function]:
    fc1, fc2, x, ln = linear(d, 9), linear(9, d), inputs(), norm()
    return (
        {"ffn": Names(fc1=fc1, fc2=fc2), "norm_before": ln},
        lambda: layer_norm(ln(x) + fc2(torch.nn.functional.gelu(fc1(ln(x)))), (d,)),
    )


def lost_direction() -> tuple[dict, Function]:
    reader, x, ln = linear(d, 9), inputs(), norm()
    return {"reader": reader, "norm": ln}, lambda: reader(ln(x))


def query_key_basis() -> tuple[dict, Function]:
    h, x = heads(), inputs()
    h["q"].bias.data.zero_()
    h["k"].bias.data.zero_()
    return {**h, "d_head": d}, lambda: attention(h, x)


def value_output_basis() -> tuple[dict, Function]:
    h, x = heads(), inputs()
    return {**h, "d_value": d}, lambda: attention(h, x)


def hidden_unit_scale() -> tuple[dict, Function]:
    gate, up, down = (nn.Linear(*shape, bias=False).double() for shape in ((d, 9), (d, 9), (9, d)))
    x = inputs()
    return {"mlp": Names(up_proj=up, down_proj=down)}, lambda: down(silu(gate(x)) * up(x))


def residual_basis() -> tuple[dict, Function]:
    embed, q, o = table(n), *(nn.Linear(d, d, bias=False).double() for _ in range(2))

    def function() -> Tensor:
        x = embed.weight
        x = x + o(torch.tanh(q(torch.nn.functional.rms_norm(x, (d,)))))
        return q(torch.nn.functional.rms_norm(x, (d,)))

    return {"embed": embed, "q": q, "o": o, "d": d}, function


def added_tables() -> tuple[dict, Function]:
    word, position, kind = table(n), table(n), table(1)
    return {"position": position, "token_type": kind}, lambda: word.weight + position.weight + kind.weight[0]


def scale_before_norm() -> tuple[dict, Function]:
    word, position, kind = table(n), table(n), table(1)
    return (
        {"word": word, "position": position, "token_type": kind},
        lambda: layer_norm(word.weight + position.weight + kind.weight[0], (d,), eps=1e-12),
    )


def whole_projection() -> tuple[dict, Function]:
    h, x = heads(), inputs()
    for module in h.values():
        module.bias.data.zero_()
    theta = h["q"].weight.detach().clone()

    def function() -> Tensor:
        """One layer, its skip left out: the stream is x before the rewrite and x Θᵀ after it."""
        return attention(h, x if torch.equal(h["q"].weight, theta) else x @ theta.T)

    return h, function


def logit_shift() -> tuple[dict, Function]:
    head, x = linear(d, 11), inputs()
    return {"lm_head": head}, lambda: torch.softmax(head(x), dim=-1)


def biases_at_one_place() -> tuple[dict, Function]:
    dense, down, x = linear(d, d), linear(d, d), inputs()
    return {"attn": Names(dense=dense), "mlp": Names(dense_4h_to_h=down)}, lambda: x + dense(x) + down(x.tanh())


def softmax_elsewhere() -> tuple[dict, Function]:
    router, x = linear(d, 4), inputs()
    return {"router": router}, lambda: torch.softmax(router(x), dim=-1)


def linear_chain() -> tuple[dict, Function]:
    first, second, x = linear(d, 4), linear(4, d), inputs()
    return {"A": first, "B": second, "n": 4}, lambda: second(first(x))


def parallel_maps() -> tuple[dict, Function]:
    layer, down, up, x = linear(d, d), nn.Linear(d, 4, bias=False).double(), linear(4, d), inputs()
    return {"layer": layer, "A": down, "B": up, "scale": 0.5}, lambda: layer(x) + 0.5 * up(down(x))


CASES = [
    ("DW003", value_bias),
    ("DW005", mean_before_layernorm),
    ("DW006", norm_affine),
    ("DW007", post_norm_shift),
    ("DW008", lost_direction),
    ("DW009", query_key_basis),
    ("DW010", value_output_basis),
    ("DW011", hidden_unit_scale),
    ("DW012", residual_basis),
    ("DW013", added_tables),
    ("DW014", scale_before_norm),
    ("DW015", whole_projection),
    ("DW016", logit_shift),
    ("DW017", biases_at_one_place),
    ("DW018", softmax_elsewhere),
    ("DW019", linear_chain),
    ("DW020", parallel_maps),
]


def weights(value: Any) -> list[Tensor]:
    """Copies of all parameters reachable from a namespace."""
    if isinstance(value, nn.Module):
        return [p.detach().clone() for p in value.parameters()]
    inside = value.values() if isinstance(value, dict) else vars(value).values() if isinstance(value, Names) else ()
    return [p for item in inside for p in weights(item)]


@pytest.mark.parametrize(("code", "case"), CASES, ids=[code for code, _ in CASES])
def test_the_example_of_a_page_keeps_the_function_and_changes_the_weights(code: str, case: Callable) -> None:
    torch.manual_seed(0)
    names, function = case()
    before, old = function().detach(), weights(names)
    (example,) = re.findall(r"```python\n(.*?)```", find_page(code).markdown, re.S)
    exec(example, {"torch": torch, "nn": nn, **names})
    assert torch.allclose(function(), before, rtol=0, atol=EXACT)
    assert any(not torch.equal(a, b) for a, b in zip(old, weights(names), strict=True))


def test_the_key_bias_of_a_page_without_positions_is_dead_and_with_rotation_is_not() -> None:
    """The positive and the negative case of the DW002 page, with a rotation by one radian per position."""
    torch.manual_seed(0)
    h, x = heads(), inputs()
    angle = torch.arange(n, dtype=torch.float64)[:, None]

    def rotate(t: Tensor) -> Tensor:
        a, b = t.chunk(2, dim=-1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1)

    def rotated() -> Tensor:
        return attend(rotate(h["q"](x)), rotate(h["k"](x)), h["v"](x))

    plain, turned = attention(h, x), rotated()
    h["k"].bias.data += torch.randn(d, dtype=torch.float64)
    assert torch.allclose(attention(h, x), plain, rtol=0, atol=EXACT)
    assert not torch.allclose(rotated(), turned, rtol=0, atol=1e-3)
