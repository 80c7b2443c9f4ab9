"""The GELU of training on a GPU: as near to GELU as bfloat16 can tell, in one graph."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from deadweight.train.fast_gelu import fast_gelu, normal, with_fast_gelu
from deadweight.train.objective import Objective
from deadweight.transformer import TransformerConfig, TransformerForCausalLM


def test_fast_gelu_is_gelu_with_its_gradient() -> None:
    x = torch.linspace(-12, 12, 20001, dtype=torch.float64, requires_grad=True)
    wide = x.detach().float().requires_grad_()
    (exact,) = torch.autograd.grad(F.gelu(x).sum(), x)
    (fast,) = torch.autograd.grad(fast_gelu(wide).sum(), wide)
    assert (normal(x)[0] - torch.special.ndtr(x)).abs().max() < 1e-7
    assert (fast_gelu(wide).double() - F.gelu(x)).abs().max() < 1e-6
    assert (fast.double() - exact).abs().max() < 1e-6
    tanh = F.gelu(x, approximate="tanh")  # a neighbour that is another function
    assert (tanh - F.gelu(x)).abs().max() > 1e-4


def test_fast_gelu_in_bfloat16_rounds_to_the_same_numbers() -> None:
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0)).bfloat16()
    same = fast_gelu(x) == F.gelu(x.float()).bfloat16()
    assert same.float().mean() > 0.999


def test_a_model_with_it_is_one_graph_and_the_same_loss() -> None:
    torch.manual_seed(0)
    config = TransformerConfig(vocab_size=64, context=16, d_model=32, n_layers=1, heads=2)
    objective = Objective(TransformerForCausalLM(config).train())
    tokens = torch.randint(0, 64, (2, 17))
    before = objective(tokens)
    with_fast_gelu(objective.model)
    assert objective.model.transformer.layers[0].mlp.activation is fast_gelu
    torch.testing.assert_close(objective(tokens), before, atol=1e-6, rtol=0)
    compiled = torch.compile(objective, fullgraph=True, backend="aot_eager")
    compiled(tokens).backward()
    torch.testing.assert_close(compiled(tokens).detach(), before.detach(), atol=1e-6, rtol=0)
