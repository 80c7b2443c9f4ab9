"""The weights of linear layers as matrices that can be changed row by row, in float64."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from deadweight.compress.locate import Rows
from deadweight.save.facts import Fact, ZeroPlaces
from deadweight.source.private_api import own_parameters


class LinearMap:
    """The weights of a linear layer as (rows, columns) in float64 on the CPU, however and wherever they are stored."""

    def __init__(self, model: nn.Module, path: str) -> None:
        self.path, self.module = path, model.get_submodule(path)
        self.transposed = isinstance(self.module, Conv1D)
        weight = self.module.get_parameter("weight").detach().cpu().double()
        self.weight = weight.T.clone() if self.transposed else weight.clone()
        bias = own_parameters(self.module).get("bias")
        self.bias = None if bias is None else bias.detach().cpu().double().clone()

    def store(self) -> None:
        old = self.module.get_parameter("weight")
        new = self.weight.T if self.transposed else self.weight
        for name, tensor in (("weight", new), ("bias", self.bias)):
            if tensor is not None:
                made = tensor.to(old.device, old.dtype).contiguous()
                self.module.register_parameter(name, nn.Parameter(made, requires_grad=old.requires_grad))

    def transform(self, rows: Tensor, matrix: Tensor) -> None:
        """rows ← matrix · rows, weights and biases."""
        self.weight[rows] = matrix.to(self.weight) @ self.weight[rows]
        if self.bias is not None:
            self.bias[rows] = matrix.to(self.weight) @ self.bias[rows]

    def zero_rows(self, rows: Sequence[int]) -> list[Fact]:
        """The facts that these rows are zero."""
        at = tuple(sorted(rows))
        facts: list[Fact] = [ZeroPlaces(f"{self.path}.weight", 1 if self.transposed else 0, at)]
        if self.bias is not None:
            facts.append(ZeroPlaces(f"{self.path}.bias", 0, at))
        return facts if at else []

    def zero_columns(self, columns: Sequence[int]) -> list[Fact]:
        at = tuple(sorted(columns))
        return [ZeroPlaces(f"{self.path}.weight", 0 if self.transposed else 1, at)] if at else []


def on_rows(rows: Rows, head: int, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of one head, and a transform of what attention sees of it as a transform of these rows."""
    factor = rows.factor[head]
    return rows.places[head], (matrix * factor[None, :]) / factor[:, None]


def has_bias(model: nn.Module, path: str | None) -> bool:
    return path is not None and own_parameters(model.get_submodule(path)).get("bias") is not None
