"""The optimizers of a training run: AdamW, or Muon for the matrices of the layers with AdamW for everything else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from deadweight.errors import DeadweightError
from deadweight.train.settings import Train

Group: TypeAlias = dict[str, Any]  # a parameter group, as torch makes them
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the iteration x·(a + b·x² + c·x⁴), which drives singular values to 1
ITERATIONS = 5
LIKE_ADAM = 0.2  # the root mean square of AdamW's updates: with it both optimizers take the same learning rates
EPSILON = 1e-8


def make_optimizer(model: nn.Module, train: Train, device: torch.device) -> torch.optim.Optimizer:
    """The optimizer of the settings. Weight decay applies to matrices and embeddings, not to vectors."""
    betas = (train.beta1, train.beta2)
    if train.optimizer == "muon":
        return Muon(muon_groups(model, train), learning_rate=train.learning_rate, betas=betas)
    own = list(model.parameters())
    matrices, vectors = [p for p in own if p.dim() > 1], [p for p in own if p.dim() <= 1]
    decays = (matrices, train.weight_decay), (vectors, 0.0)
    groups = [{"params": params, "weight_decay": decay} for params, decay in decays if params]
    return torch.optim.AdamW(groups, lr=train.learning_rate, betas=betas, fused=device.type == "cuda")


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float | Tensor) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def muon_groups(model: nn.Module, train: Train) -> list[Group]:
    """The weights of linear layers inside the blocks; tables and readout; vectors."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    linear = {
        id(m.weight) for n, m in model.named_modules() if isinstance(m, nn.Linear) and not n.endswith("readout")
    } - tables
    own = list(model.parameters())
    split = {
        ("muon", train.weight_decay): [p for p in own if id(p) in linear],
        ("adamw", train.weight_decay): [p for p in own if id(p) not in linear and p.dim() > 1],
        ("adamw", 0.0): [p for p in own if p.dim() <= 1],
    }
    return [{"params": ps, "rule": rule, "weight_decay": decay} for (rule, decay), ps in split.items() if ps]


class Muon(torch.optim.Optimizer):
    """Momentum whose matrix is replaced by the nearest orthogonal one (Jordan et al. 2024); AdamW for the rest.

    The update of an n × m matrix is scaled by 0.2·√max(n, m), the size of AdamW's (arXiv 2502.16982), so both take the
    same learning rate and weight decay.
    """

    def __init__(
        self, groups: Iterable[Group], *, learning_rate: float, betas: tuple[float, float], momentum: float = 0.95
    ) -> None:
        super().__init__(groups, {"lr": learning_rate, "betas": betas, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if any(isinstance(p, DTensor) for p in params):
                raise DeadweightError(
                    "found optimizer = muon with sharded weights; expected adamw, or weights in one piece"
                )
            for p in params:
                p.mul_(1 - group["lr"] * group["weight_decay"])
            (self.orthogonal if group["rule"] == "muon" else self.adaptive)(group, params)

    def orthogonal(self, group: Group, params: list[nn.Parameter]) -> None:
        """Matrices of one shape are orthogonalised together."""
        by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for p in params:
            by_shape[p.shape].append(p)
        for shape, same in by_shape.items():
            updates = orthogonalised(torch.stack([self.with_momentum(p, group["momentum"]) for p in same]))
            size = LIKE_ADAM * max(shape) ** 0.5
            for p, update in zip(same, updates, strict=True):
                p.sub_(update.to(p.dtype) * (group["lr"] * size))

    def with_momentum(self, p: nn.Parameter, momentum: float) -> Tensor:
        """Nesterov's momentum."""
        assert p.grad is not None
        state = self.state[p]
        if not state:
            state["momentum"] = torch.zeros_like(p)
        state["momentum"].lerp_(p.grad, 1 - momentum)
        return p.grad.lerp(state["momentum"], momentum)

    def adaptive(self, group: Group, params: list[nn.Parameter]) -> None:
        """AdamW without its decay, which is done."""
        one, two = group["betas"]
        for p in params:
            assert p.grad is not None
            state = self.state[p]
            if not state:
                state |= {"step": torch.zeros((), device=p.device)}
                state |= {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
            state["step"] += 1
            first, second = state["exp_avg"].lerp_(p.grad, 1 - one), state["exp_avg_sq"]
            second.mul_(two).addcmul_(p.grad, p.grad, value=1 - two)
            size = (second / (1 - two ** state["step"])).sqrt() + EPSILON
            p.sub_(first / (1 - one ** state["step"]) / size * group["lr"])


def orthogonalised(matrices: Tensor) -> Tensor:
    """U·Vᵀ of the singular value decomposition, roughly: five steps of a Newton–Schulz iteration leave singular values
    between about 0.7 and 1.2. In bfloat16 on a GPU."""
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
