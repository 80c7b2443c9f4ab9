"""The strides of a fused operation's result, kept when the operation is spelled out.

The model's code may take a view of the result, which only exists for some strides. torch's own kernel decides them, so
it is run on fake tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from deadweight.source.private_api import OpOverload, run_own_kernel
from deadweight.source.type_aliases import Arguments, Keywords, Leaf, Options


def with_layout_of(fused: OpOverload, spelled_out: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The spelled-out function, whose result has the strides that the fused operation gives it."""

    @functools.wraps(spelled_out)
    def function(*args: Leaf, **kwargs: Leaf) -> Tensor:
        result = spelled_out(*args, **kwargs)
        wanted = strides_of(fused, args, kwargs)
        return result if wanted == result.stride() else laid_out(result, wanted)

    return function


def strides_of(fused: OpOverload, args: Arguments, kwargs: Keywords) -> tuple[int, ...]:
    """The strides of the operation's result, computed outside of any trace."""
    shadows = pytree.tree_map_only(Tensor, Description, (args, kwargs))
    with _disable_current_modes(), FakeTensorMode():
        args, kwargs = pytree.tree_map_only(Description, Description.tensor, shadows)
        return tuple(run_own_kernel(fused, args, kwargs).stride())  # fused() itself would be spelled out again


class Description:
    """Everything about a tensor that a kernel may depend on, except its values."""

    def __init__(self, like: Tensor) -> None:
        self.size, self.stride = tuple(like.shape), like.stride()
        self.options: Options = {"dtype": like.dtype, "device": like.device, "requires_grad": like.requires_grad}

    def tensor(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, **self.options)


def laid_out(value: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A copy of the value whose axes lie in memory in the order of these strides."""
    order = sorted(range(value.dim()), key=lambda axis: -strides[axis])
    empty = torch.empty_permuted(value.shape, order, dtype=value.dtype, device=value.device)
    return torch.ops.aten.copy.default(empty, value)
