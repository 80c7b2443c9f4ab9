"""The layers of a slim checkpoint.

A slim layer computes the same as its original with fewer numbers: zero rows and columns are not stored, identity blocks
pass their input through, and norms with a gain of one store none.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from .format import (
    SIGN,
    BiasSpec,
    EmbeddingSpec,
    IdentitySpec,
    LayerSpec,
    LinearSpec,
    PlainLinearSpec,
    RowGroup,
    SlimSpec,
    WithoutSpec,
)

IGNORED = "_keys_to_ignore_on_load_unexpected"

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class SlimLinear(nn.Module):
    """A linear layer whose rows are stored in groups.

    A group reads some columns (all, or those that `columns_N` lists) through a dense matrix. Where it has `heads`, each
    head's rows also receive the inputs that `through_N` lists, unchanged: the identity block of its matrix. A group
    without columns is constant. `order` puts the rows of all groups where they belong.
    """

    def __init__(self, spec: LinearSpec) -> None:
        super().__init__()
        self.spec = spec
        self.in_features, self.out_features = spec.inputs, spec.outputs
        for i, group in enumerate(spec.groups):
            if group.columns:
                self.register_parameter(f"weight_{i}", nn.Parameter(torch.empty(group.rows, group.columns)))
            if group.bias:
                self.register_parameter(f"bias_{i}", nn.Parameter(torch.empty(group.rows)))
            if 0 < group.columns < self.in_features:
                self.register_buffer(f"columns_{i}", torch.zeros(group.columns, dtype=torch.int32))
            if group.heads:
                width = group.rows // group.heads
                self.register_buffer(f"through_{i}", torch.zeros(width, dtype=torch.int32))
        if spec.shuffled:
            self.register_buffer("order", torch.zeros(self.out_features, dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        rows = [self.group(x, i, group) for i, group in enumerate(self.spec.groups)]
        y = rows[0] if len(rows) == 1 else torch.cat(rows, -1)
        order = getattr(self, "order", None)
        return y if order is None else y.index_select(-1, order)

    def group(self, x: Tensor, i: int, group: RowGroup) -> Tensor:
        bias = getattr(self, f"bias_{i}", None)
        if not group.columns:
            y = x.new_zeros(*x.shape[:-1], group.rows)
            y = y if bias is None else y + bias
        else:
            columns = getattr(self, f"columns_{i}", None)
            read = x if columns is None else x.index_select(-1, columns)
            y = linear(read, getattr(self, f"weight_{i}"), bias)
        if group.heads:
            through = x.index_select(-1, getattr(self, f"through_{i}"))
            y = (y.unflatten(-1, (group.heads, -1)) + through.unsqueeze(-2)).flatten(-2)
        return y

    @property
    def bias(self) -> Tensor | None:
        """The whole bias, for code that reads it; None if there is none."""
        if not any(group.bias for group in self.spec.groups):
            return None
        like = self.like()
        parts = [
            getattr(self, f"bias_{i}") if group.bias else like.new_zeros(group.rows)
            for i, group in enumerate(self.spec.groups)
        ]
        return self.ordered(torch.cat(parts))

    @property
    def weight(self) -> Tensor:
        """The whole matrix, for code that reads it; computed on access."""
        like = self.like()
        eye = torch.eye(self.in_features, dtype=like.dtype, device=like.device)
        bias = self.bias
        dense = self.forward(eye) if bias is None else self.forward(eye) - bias
        return dense if self.spec.transposed else dense.T

    def like(self) -> Tensor:
        return next(self.parameters())

    def ordered(self, value: Tensor) -> Tensor:
        order = getattr(self, "order", None)
        return value if order is None else value.index_select(0, order)

    def extra_repr(self) -> str:
        stored = sum(p.numel() for p in self.parameters())
        return f"{self.in_features} → {self.out_features}, {stored:,} numbers stored"


class SlimEmbedding(nn.Module):
    """An embedding table without its one zero column."""

    def __init__(self, spec: EmbeddingSpec) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = spec.rows, spec.width
        self.padding_idx, self.place = spec.padding, spec.place
        self.table = nn.Parameter(torch.empty(self.num_embeddings, self.embedding_dim - 1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.widened(embedding(ids, self.table, self.padding_idx))

    def widened(self, rows: Tensor) -> Tensor:
        before, after = rows[..., : self.place], rows[..., self.place :]
        return torch.cat([before, rows.new_zeros(*rows.shape[:-1], 1), after], -1)

    @property
    def weight(self) -> Tensor:
        return self.widened(self.table)


def make_slim_layer(module: nn.Module, spec: LayerSpec) -> nn.Module:
    """The slim form of one layer."""
    if isinstance(spec, LinearSpec):
        return SlimLinear(spec)
    if isinstance(spec, PlainLinearSpec):
        return nn.Linear(spec.inputs, spec.outputs, bias=spec.bias)
    if isinstance(spec, EmbeddingSpec):
        return SlimEmbedding(spec)
    if isinstance(spec, IdentitySpec):
        return nn.Identity()
    if isinstance(spec, BiasSpec):
        like = module.get_parameter("weight")
        module.register_parameter("bias", nn.Parameter(like.new_empty(spec.outputs), like.requires_grad))
    elif isinstance(spec, WithoutSpec):
        for name, value in spec.constants.items():
            without(module, name, value)
    return module


def without(module: nn.Module, name: str, value: float) -> None:
    """Remove a constant parameter from a module, and put a number in its place for code that reads it."""
    takes_none = isinstance(module, (nn.LayerNorm, nn.RMSNorm, nn.Linear, *CONVOLUTIONS))
    del module._parameters[name]
    if takes_none:
        module.register_parameter(name, None)
    else:
        setattr(module, name, torch.full((), value, device="cpu"))


def install(model: nn.Module, slim: SlimSpec) -> None:
    """Replace every layer that the checkpoint stores in a smaller form, wherever the model uses it."""
    uses: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        uses.setdefault(module, []).append(path)
    for path, spec in slim.layers.items():
        old = model.get_submodule(path)
        like = next(old.parameters(), None)
        new = make_slim_layer(old, spec)
        if new is not old:
            new.to(torch.get_default_dtype() if like is None else like.dtype)
            new.requires_grad_(like is None or any(p.requires_grad for p in old.parameters()))
        for place in uses[old]:
            parent, _, name = place.rpartition(".")
            setattr(model.get_submodule(parent), name, new)
    leave_fast_path(model, slim)
    if hasattr(model, IGNORED):  # a model of transformers, which would report the empty weight of the checkpoint
        guards = {f"{path}.weight".replace(".", r"\.") for path in slim.layers_in_other_form}
        setattr(model, IGNORED, {*(getattr(model, IGNORED) or ()), *guards, SIGN})


def leave_fast_path(model: nn.Module, slim: SlimSpec) -> None:
    """Make torch's own encoder call its layers: its fused kernel would read weights that they no longer have."""
    for path, module in model.named_modules():
        if not any(layer.startswith(f"{path}." if path else "") for layer in slim.layers):
            continue
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # only says whether the kernel has this activation
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
