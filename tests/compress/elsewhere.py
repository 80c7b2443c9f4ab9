"""A simulated GPU on the CPU: its tensors carry a mark, and operations that mix devices fail.

On a machine without a GPU this finds what would fail on one: an operation on tensors of two devices, a result that was
forgotten there. `Tensor.device` of a marked tensor is cuda:0; tensors made for that device are marked; what comes out
of an operation on marked tensors is marked; `.cpu()` takes the mark off.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState  # type: ignore[import-untyped,unused-ignore]
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from deadweight.compress.streaming import Again

THERE, HERE = torch.device("cuda:0"), torch.device("cpu")
DEVICE = Tensor.device.__get__  # type: ignore[attr-defined]
GRAD = Tensor.grad.__get__  # type: ignore[attr-defined]
SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
LOOKS = {"__getitem__", "index_select", "__setitem__", "index_put_", "__get__", "__set__", "__len__", "__repr__"}
LEAVES = {"cpu", "tolist", "item", "__float__", "__int__", "__bool__", "numpy"}


def marked(x: Any) -> bool:
    return isinstance(x, Tensor) and getattr(x, "elsewhere", False)


def mark(x: Any) -> Any:
    if isinstance(x, Tensor) and not marked(x):
        x.elsewhere = True  # type: ignore[attr-defined]
    return x


def is_device(x: Any) -> bool:
    return (isinstance(x, torch.device) and x.type == "cuda") or (isinstance(x, str) and x.startswith("cuda"))


def is_cpu(x: Any) -> bool:
    return (isinstance(x, torch.device) and x.type == "cpu") or (isinstance(x, str) and x == "cpu")


class Elsewhere(TorchFunctionMode):
    """Every call of torch passes here."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        leaves = tree_leaves((args, kwargs))
        there = [x for x in leaves if marked(x)]
        if func is torch.device:
            return func(*args, **kwargs)
        if func == DEVICE:
            return THERE if marked(args[0]) else HERE
        if func == GRAD:
            found = func(*args, **kwargs)
            return mark(found) if marked(args[0]) else found
        if func == SET_DATA:  # a tensor is where its data is
            func(*args)
            args[0].elsewhere = marked(args[1])
            return None
        if name == "__deepcopy__":  # its other argument is a memory of everything copied
            return mark(func(*args)) if marked(args[0]) else func(*args)
        if name == "register_hook" and there:
            own = args[1]
            return func(args[0], lambda gradient: own(mark(gradient)))
        asked = [x for x in leaves if is_device(x)]
        back = [x for x in leaves if is_cpu(x)]
        args, kwargs = tree_map(lambda x: HERE if is_device(x) else x, (args, kwargs))
        if name not in LOOKS and name not in ("to", "copy_", "type_as"):
            mixed = [x for x in leaves if isinstance(x, Tensor) and not marked(x) and x.dim() > 0]
            if there and mixed:
                shapes = [tuple(x.shape) for x in leaves if isinstance(x, Tensor)]
                raise RuntimeError(f"Expected all tensors to be on the same device: {name} of shapes {shapes}")
        found = func(*args, **kwargs)
        if name in LEAVES or (name == "to" and back):
            return found.clone() if isinstance(found, Tensor) and marked(found) else found
        goes = bool(asked) or (bool(there) and name not in ("to", "type_as", "__set__"))
        if name in ("to", "type_as") and not asked and not back:
            goes = marked(args[1]) if len(args) > 1 and isinstance(args[1], Tensor) else marked(args[0])
        if name == "copy_":
            goes = marked(args[0])
        if not goes:
            return found
        if not there and asked:
            found = tree_map(lambda x: x.clone() if isinstance(x, Tensor) and not x.requires_grad else x, found)
        return tree_map(mark, found)


@contextmanager
def elsewhere(patch: pytest.MonkeyPatch, room: int = 1 << 40) -> Iterator[None]:
    """Modules go to the device by `.to`, whose parameters and buffers are marked in place. It has `room` free bytes."""
    plain = nn.Module.to

    def to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        goes = [x for x in (*args, *kwargs.values()) if is_device(x)]
        rest = [a for a in args if not is_device(a)]
        also = {k: v for k, v in kwargs.items() if not is_device(v)}
        if rest or also:
            plain(self, *rest, **also)
        if goes or any(marked(p) for p in self.parameters()):
            for tensor in (*self.parameters(), *self.buffers()):
                mark(tensor)
        return self

    new, copied = nn.Parameter.__new__, nn.Parameter.__deepcopy__

    def made(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        found = new(cls, data, requires_grad)
        return mark(found) if marked(data) else found

    def copy(self: Any, memo: Any) -> Any:
        return mark(copied(self, memo)) if marked(self) else copied(self, memo)

    back = Again.backward

    def again(ctx: Any, *gradients: Any) -> Any:  # autograd calls without modes, and with tensors of its own
        saved = [mark(t) for t in ctx.saved_tensors]
        seen = SimpleNamespace(
            saved_tensors=saved, needs_input_grad=ctx.needs_input_grad, watcher=ctx.watcher, again=ctx.again
        )
        with Elsewhere():
            return back(seen, *map(mark, gradients))

    patch.setattr(Again, "backward", staticmethod(again))
    patch.setattr(nn.Parameter, "__new__", made)
    patch.setattr(nn.Parameter, "__deepcopy__", copy)
    patch.setattr(nn.Module, "to", to)
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "mem_get_info", lambda *_: (room, room))
    patch.setattr(torch.cuda, "synchronize", lambda *_: None)
    patch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    AcceleratorState._reset_state(reset_partial_state=True)  # it remembers the device that it has found first
    try:
        with Elsewhere():
            yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
