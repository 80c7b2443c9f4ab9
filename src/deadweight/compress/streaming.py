"""Streaming: weights are loaded one block at a time, and blocks are recomputed for gradients.

A checkpoint's weights stay on disk, mapped into memory, or on a GPU in their own precision. Before a block runs, its
weights are copied to the device in the precision of the computation; afterwards the copies are freed. For gradients,
only the inputs of every block are kept, and the block runs a second time in the backward pass. So memory holds one
block and the activations between blocks. A block is not recomputed if its inputs or outputs are more than tensors and
plain values, or if somebody has hooked into it: its side effects would be lost.

Why not a library: accelerate's hooks move weights in the precision in which they are stored, and take them away after
the forward pass, so no gradient can pass through. torch.utils.checkpoint runs a block again, but its weights have to be
in memory until the backward pass is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from deadweight.source.private_api import forward_hooks, forward_pre_hooks, own_buffers, own_parameters

NAME, AWAY = "_streaming", "_weights_away"  # attributes of a model that is streamed, and of a part of it in use
CONTAINERS = (nn.ModuleList, nn.ModuleDict)
LARGE = 1 << 24  # numbers: a larger embedding or linear layer outside blocks is streamed too
PLAIN = (Tensor, int, float, str, bytes, slice, type(None), torch.dtype, torch.device, torch.Size)
ROOM = 0.5  # of a GPU's free memory that weights may take; larger models are streamed block by block


@dataclass(frozen=True)
class Streaming:
    """The device and precision of a model's computation, and the hooks before and after each of its parts."""

    device: torch.device
    precision: torch.dtype

    def arrive(self, part: nn.Module, args: Any) -> None:
        """Before a part runs: replace its stored weights by copies on the device, in the right precision."""
        away = part.__dict__.setdefault(AWAY, [])
        for module in part.modules():
            for name, weight in own_parameters(module).items():
                if weight is not None and (ready := self.ready(weight)) is not weight:
                    away.append((module, name, weight))
                    own_parameters(module)[name] = nn.Parameter(ready, False)

    def ready(self, tensor: Tensor) -> Tensor:
        """The tensor on the model's device and in its precision; not copied if it is there already."""
        precision = self.precision if tensor.is_floating_point() else tensor.dtype
        here = tensor.device == self.device and tensor.dtype == precision
        return tensor if here else tensor.detach().to(self.device, precision)

    def leave(self, part: nn.Module, args: Any, output: Any) -> None:
        for module, name, weight in part.__dict__.pop(AWAY, ()):
            own_parameters(module)[name] = weight


def stream(model: nn.Module, device: torch.device, precision: torch.dtype) -> None:
    """Make the model compute on this device in this precision, without changing its stored weights."""
    if device.type == "cuda":
        size = sum(t.numel() * t.element_size() for t in model.parameters())
        if size < ROOM * torch.cuda.mem_get_info(device)[0]:
            model.to(device)
    streaming = Streaming(device, precision)
    blocks = {id(m): m for m in map(model.get_submodule, blocks_of(model))}
    inside = {id(part) for block in blocks.values() for part in block.modules()}
    large = [m for m in model.modules() if id(m) not in inside and is_large(m)]
    for part in (*blocks.values(), *large):
        part.register_forward_pre_hook(streaming.arrive)
        part.register_forward_hook(streaming.leave, always_call=True)
    setattr(model, NAME, streaming)
    place_rest(model)


def is_large(part: nn.Module) -> bool:
    return isinstance(part, (nn.Embedding, nn.Linear)) and sum(p.numel() for p in part.parameters()) >= LARGE


def is_hook(hook: Any) -> bool:
    return isinstance(getattr(hook, "__self__", None), Streaming)


def place_rest(model: nn.Module) -> None:
    """Move what is not streamed to the device, once: small weights and buffers. Tied weights stay tied."""
    streaming = model.__dict__.get(NAME)
    if streaming is None:
        return
    coming = [part for part in model.modules() if any(map(is_hook, forward_pre_hooks(part)))]
    inside = {id(part) for block in coming for part in block.modules()}
    known: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, buffer in own_buffers(module).items():
            if buffer is not None:
                own_buffers(module)[name] = streaming.ready(buffer)
        for weight in own_parameters(module).values() if id(module) not in inside else ():
            if weight is not None and (ready := streaming.ready(weight)) is not weight:
                known.setdefault(id(weight), nn.Parameter(ready, weight.requires_grad))
    for module in model.modules():
        for name, weight in own_parameters(module).items():
            if id(weight) in known:
                own_parameters(module)[name] = known[id(weight)]


def gather_weights(model: nn.Module) -> nn.Module:
    """Turn a streamed model into a plain one: all weights on its device, in the precision of its computation."""
    streaming = model.__dict__.pop(NAME, None)
    if streaming is None:
        return model
    for part in model.modules():
        for hooks in (part._forward_pre_hooks, part._forward_hooks):
            for key in [key for key, hook in hooks.items() if is_hook(hook)]:
                hooks.pop(key)
                part._forward_hooks_always_called.pop(key, None)
    return model.to(streaming.device, streaming.precision)


def device_of(model: nn.Module) -> torch.device:
    """The device that a model computes on, streamed or not."""
    streaming = model.__dict__.get(NAME)
    return next(model.parameters()).device if streaming is None else streaming.device


def float_of(model: nn.Module) -> torch.dtype:
    """The precision that a model computes in, streamed or not."""
    streaming = model.__dict__.get(NAME)
    if streaming is not None:
        return streaming.precision
    return next(p.dtype for p in model.parameters() if p.is_floating_point())


def blocks_of(model: nn.Module, paths: Sequence[str] = ()) -> list[str]:
    """The members of all outermost lists of modules, and those of `paths` that are in none of them.

    A list or a dictionary is never called: if it is a member, its own members count.
    """
    blocks: list[str] = []
    for path, part in model.named_modules(remove_duplicate=False):
        holder, _, name = path.rpartition(".")
        listed = bool(name) and isinstance(model.get_submodule(holder), CONTAINERS)
        if isinstance(part, CONTAINERS) or any(path.startswith(f"{block}.") for block in blocks):
            continue
        if listed and any(isinstance(model.get_submodule(h), nn.ModuleList) for h in holders(path)):
            blocks.append(path)
    return blocks + [path for path in paths if not any(path.startswith(f"{block}.") for block in blocks)]


def holders(path: str) -> Iterator[str]:
    """The paths of all modules that contain the one at a path."""
    while path := path.rpartition(".")[0]:
        yield path


class NotAloneError(Exception):
    """A block that cannot be recomputed from its inputs alone."""


class Watcher(Protocol):
    """An observer of recomputed blocks. `answer` gets a block's outputs, the gradients with respect to them and its
    inputs, and returns the gradients with respect to the inputs."""

    again: bool

    def answer(
        self, outputs: Sequence[Tensor], given: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> Sequence[Tensor | None]: ...


class StreamedBlock:
    """A block that keeps only its inputs for the backward pass, and is recomputed there."""

    def __init__(self, module: nn.Module, watcher: Watcher) -> None:
        hooks = (*forward_pre_hooks(module), *forward_hooks(module))
        if not all(map(is_hook, hooks)) or module._backward_hooks or module._backward_pre_hooks:
            raise NotAloneError(f"a {type(module).__name__} that somebody has hooked into")
        self.module, self.watcher = module, watcher
        self.made: list[Tensor] = []
        self.forward, self.inside = module.forward, False
        self.start = torch.zeros((), requires_grad=True)  # asks for gradients where nothing before the block does

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.inside or not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        given, form = pytree.tree_flatten((args, kwargs))
        expect_plain(self.module, given)
        context = copy_context()  # autograd has threads of its own

        def again(*fresh: Tensor) -> list[Any]:
            rest = iter(fresh)
            args, kwargs = pytree.tree_unflatten([next(rest) if isinstance(x, Tensor) else x for x in given], form)
            return pytree.tree_leaves(context.run(self.again, *args, **kwargs))

        forms: list[Any] = []

        def first() -> list[Any]:
            outputs, form = pytree.tree_flatten(self.forward(*args, **kwargs))
            forms.append(form)
            return outputs

        tensors = [x for x in given if isinstance(x, Tensor)]
        before = [x._version for x in tensors]
        leaves = Again.apply(self.watcher, first, again, self.start, *tensors)
        expect_plain(self.module, leaves)
        if {x.data_ptr() for x in leaves if isinstance(x, Tensor)} & {x.data_ptr() for x in tensors}:
            raise NotAloneError(f"a {type(self.module).__name__} that gives what it is given")
        same = [*map(id, pytree.tree_leaves((args, kwargs)))] == [*map(id, given)]
        if not same or [x._version for x in tensors] != before:
            raise NotAloneError(f"a {type(self.module).__name__} that changes what it is given")
        self.made += [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
        return pytree.tree_unflatten(list(leaves), forms[0])

    def again(self, *args: Any, **kwargs: Any) -> Any:
        """Recompute the block, with all its hooks."""
        self.inside = self.watcher.again = True
        try:
            return self.module(*args, **kwargs)
        finally:
            self.inside = self.watcher.again = False


def expect_plain(block: nn.Module, values: Sequence[Any]) -> None:
    """Raise NotAloneError for a value that may hide tensors."""
    if strange := [type(x).__name__ for x in values if not isinstance(x, PLAIN)]:
        raise NotAloneError(f"a {type(block).__name__} that is given, or gives, a {strange[0]}")


class Again(torch.autograd.Function):
    """The autograd function of one call of a block."""

    @staticmethod
    def forward(ctx: Any, watcher: Watcher, first: Any, again: Any, start: Tensor, *tensors: Tensor) -> tuple[Any, ...]:
        ctx.watcher, ctx.again = watcher, again
        ctx.save_for_backward(*tensors)
        return tuple(first())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[4:]
        inputs = [t.detach().requires_grad_(n) for t, n in zip(ctx.saved_tensors, needed, strict=True)]
        with torch.enable_grad():
            leaves = ctx.again(*inputs)
        pairs = [
            (x, g)
            for x, g in zip(leaves, gradients, strict=True)
            if isinstance(x, Tensor) and x.requires_grad and g is not None
        ]
        asked = [t for t in inputs if t.requires_grad]
        answers = iter(ctx.watcher.answer([x for x, _ in pairs], [g for _, g in pairs], asked))
        return None, None, None, None, *(next(answers) if n else None for n in needed)


@contextmanager
def run_again(model: nn.Module, paths: Sequence[str], watcher: Watcher) -> Iterator[Callable[[Tensor], None]]:
    """A context in which every block keeps only its inputs; each of `paths` is a block or inside one.

    Yields a function that runs the backward pass of a loss through all blocks, even those it does not depend on.
    """
    blocks = {id(m): StreamedBlock(m, watcher) for m in map(model.get_submodule, blocks_of(model, paths))}
    before = {key: block.module.__dict__.get("forward") for key, block in blocks.items()}
    for block in blocks.values():
        block.module.forward = block
    try:
        yield lambda loss: backward(loss, [x for block in blocks.values() for x in block.made])
    finally:
        for key, block in blocks.items():
            del block.module.forward
            if (own := before[key]) is not None:  # another hook had replaced it
                block.module.forward = own


def backward(loss: Tensor, others: Sequence[Tensor]) -> None:
    nothing = [torch.zeros((), dtype=x.dtype, device=x.device).expand(x.shape) for x in others]
    torch.autograd.backward([loss, *others], [torch.ones_like(loss), *nothing])
