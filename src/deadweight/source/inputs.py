"""Example inputs: small, valid, and able to be drawn again at random."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.utils import _pytree as pytree

from deadweight.errors import DeadweightError
from deadweight.source.type_aliases import Arguments, ExampleInputs, Keywords, Leaf

Path = tuple[Leaf, ...]  # the keys that lead to a leaf of a pytree
PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, torch.Size, range)


@dataclass(frozen=True)
class Span:
    """The integers low..high without the avoided ones."""

    low: int
    high: int
    avoid: tuple[int, ...] = ()

    def draw(self, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
        """Uniform integers of the span; an avoided one is drawn again (at most 64 times, then it stays)."""
        drawn = torch.randint(self.low, self.high + 1, shape, generator=generator)
        avoid = torch.tensor(self.avoid, dtype=torch.long)
        for _ in range(64):
            bad = torch.isin(drawn, avoid)
            if not bad.any():
                break
            drawn = torch.where(bad, torch.randint(self.low, self.high + 1, shape, generator=generator), drawn)
        return drawn


@dataclass(frozen=True)
class Inputs:
    """The inputs of one call, on the CPU; `spans` are the valid integers of an input, by keyword."""

    args: Arguments = ()
    kwargs: Keywords = field(default_factory=dict)
    spans: Mapping[str, Span | None] = field(default_factory=dict)  # None: this input stays as it is

    def on(self, device: torch.device, dtype: torch.dtype | None = None) -> tuple[Arguments, Keywords]:
        """The inputs on a device, their floats in a precision."""

        def move(leaf: Leaf) -> Leaf:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return leaf.to(device, dtype if leaf.is_floating_point() else None)

        return pytree.tree_map(move, (self.args, self.kwargs))

    def draw(self, generator: torch.Generator) -> tuple[Arguments, Keywords]:
        """Fresh random inputs of the same shapes and types."""

        def fresh(path: Path, leaf: Leaf) -> Leaf:
            key = str(getattr(path[1], "key", "")) if len(path) > 1 else ""
            if not isinstance(leaf, torch.Tensor) or (key in self.spans and self.spans[key] is None):
                return leaf
            return _redrawn(leaf, self.spans.get(key), generator)

        return pytree.tree_map_with_path(fresh, (self.args, self.kwargs))

    def cast(self, dtype: torch.dtype) -> Inputs:
        """The same inputs with their floats in another precision."""
        return Inputs(*self.on(torch.device("cpu"), dtype), self.spans)


def _redrawn(leaf: torch.Tensor, span: Span | None, generator: torch.Generator) -> torch.Tensor:
    if leaf.dtype == torch.bool or leaf.numel() == 0 or not bool(torch.isfinite(leaf).all()):
        return leaf  # a mask with infinities stays as it is
    if leaf.is_floating_point() or leaf.is_complex():
        spread = float(leaf.abs().double().pow(2).mean().sqrt()) or 1.0
        return torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype) * spread
    span = span or Span(int(leaf.min()), int(leaf.max()))
    return span.draw(leaf.shape, generator).to(leaf.dtype)


def as_inputs(given: ExampleInputs | Inputs) -> Inputs:
    """What a user passes: a tensor, a tuple or list of positional inputs, or a dict of keywords."""
    if isinstance(given, Inputs):
        return given
    if isinstance(given, Mapping):
        return refuse_hidden_tensors(Inputs(kwargs=_on_cpu(dict(given))))
    if isinstance(given, (tuple, list)):
        return refuse_hidden_tensors(Inputs(args=_on_cpu(tuple(given))))
    return refuse_hidden_tensors(Inputs(args=(_on_cpu(given),)))


def _on_cpu(tree: Leaf) -> Leaf:
    return pytree.tree_map(lambda leaf: _with_values(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def _with_values(tensor: torch.Tensor) -> torch.Tensor:
    """On the CPU; a tensor of the meta device, which has no values, becomes ones if it is a float and zeros if not."""
    if not tensor.is_meta:
        return tensor.detach().cpu().clone()  # in-place operations of a model must not change the user's tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype).fill_(tensor.is_floating_point())


def refuse_hidden_tensors(inputs: Inputs) -> Inputs:
    """The inputs; raises if an object among them hides tensors from pytree: they would become constants."""
    for path, leaf in pytree.tree_flatten_with_path((inputs.args, inputs.kwargs))[0]:
        hidden = [name for name, value in fields_of(leaf).items() if isinstance(value, torch.Tensor)]
        if hidden:
            raise DeadweightError(
                f"input {path_name(path[1:])} is a {type(leaf).__name__} that holds tensors ({', '.join(hidden)}); "
                "expected tensors in tuples, lists or dicts, or a class known to torch.export.register_dataclass"
            )
    return inputs


def fields_of(leaf: Leaf) -> Keywords:
    """The fields of an object that pytree does not look into."""
    if isinstance(leaf, (*PLAIN, torch.Tensor, type)) or callable(leaf):
        return {}
    if isinstance(leaf, Mapping):
        return {str(key): value for key, value in leaf.items()}
    if dataclasses.is_dataclass(leaf):
        return {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}
    return dict(vars(leaf)) if hasattr(leaf, "__dict__") else {}


def path_name(path: Path) -> str:
    """The path of a leaf as an identifier."""
    words = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", "")))) for key in path]
    return "_".join("".join(c if c.isalnum() else "_" for c in word) for word in words)
