"""Example inputs from what people write on a command line: shapes, or a safetensors file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from deadweight.errors import DeadweightError
from deadweight.source.examples import first_that_runs
from deadweight.source.inputs import Inputs
from deadweight.source.module_copies import share_tensors
from deadweight.source.printable import printable, reason
from deadweight.source.written_shapes import SAVED, WrittenTensor, parse_tensors

SEED = 0


def make_tensor(tensor: WrittenTensor, high: int) -> Tensor:
    """A random tensor of this shape; integers are below its own bound, or else below `high`."""
    generator = torch.Generator().manual_seed(SEED)
    if tensor.kind == "int":
        return torch.randint(0, tensor.high or high, tensor.shape, generator=generator)
    if tensor.kind == "bool":
        return torch.ones(tensor.shape, dtype=torch.bool)
    return torch.randn(tensor.shape, generator=generator)


@dataclass(frozen=True)
class WrittenInputs:
    """The inputs of one call: unnamed ones by position, the others by keyword."""

    tensors: tuple[WrittenTensor, ...]

    def make(self, high: int) -> Inputs:
        named = {t.name: make_tensor(t, high) for t in self.tensors if t.name}
        return Inputs(tuple(make_tensor(t, high) for t in self.tensors if not t.name), named)

    def choose(self, module: nn.Module) -> Inputs:
        """Integers below the rows of the first table, or of the smallest where the model does not run on those."""
        choices = [self.make(high) for high in bounds(module)]
        inputs, _ = first_that_runs(share_tensors(module), choices)
        return in_precision_of(module, choices[-1] if inputs is None else inputs)


def in_precision_of(module: nn.Module, inputs: Inputs) -> Inputs:
    """The inputs with their floats in the dtype of the module's first float parameter: a bfloat16 model takes those."""
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
    return inputs if dtype is None else inputs.cast(dtype)


def bounds(module: nn.Module) -> list[int]:
    """Upper bounds of integers to try: the rows of the first table, then of the smallest; 2 where there is none."""
    rows = [table.num_embeddings for table in module.modules() if isinstance(table, nn.Embedding)]
    return list(dict.fromkeys([rows[0], min(rows)])) if rows else [2]


def read_inputs(written: str, module: nn.Module) -> Inputs:
    """What `--inputs` says: a safetensors file, whose names are those of forward's arguments, or shapes."""
    if written.endswith(SAVED):
        return Inputs(kwargs=read_tensors(Path(written)))
    return WrittenInputs(parse_tensors(written)).choose(module)


def read_tensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except Exception as error:  # safetensors raises its own kinds
        raise DeadweightError(
            f"inputs {printable(file)} cannot be read ({reason(error)}); expected a safetensors file with one tensor "
            "for every argument of forward, under its name"
        ) from error


def first_tensors(module: nn.Module) -> Iterator[tuple[str, WrittenTensor]]:
    """Inputs that the layers of a module take, the first layers first, each with the layer's name."""
    for name, layer in module.named_modules():
        if any(layer.children()) and not isinstance(layer, nn.MultiheadAttention):
            continue
        for tensor in tensors_for(layer):
            yield name or type(layer).__name__, tensor


def tensors_for(layer: nn.Module) -> Iterable[WrittenTensor]:
    """Inputs for a layer of torch.nn, the likeliest first; none for a layer whose input may have any shape."""
    if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
        return WrittenTensor((2, 5), "int", layer.num_embeddings), WrittenTensor((2,), "int", layer.num_embeddings)
    if isinstance(layer, (nn.Conv1d, nn.BatchNorm1d)):
        channels = layer.in_channels if isinstance(layer, nn.Conv1d) else layer.num_features
        return WrittenTensor((2, channels, 64)), WrittenTensor((2, channels))
    if isinstance(layer, (nn.Conv2d, nn.BatchNorm2d)):
        channels = layer.in_channels if isinstance(layer, nn.Conv2d) else layer.num_features
        return [WrittenTensor((2, channels, size, size)) for size in (32, 28, 64, 224, 16, 96, 128, 256)]
    if isinstance(layer, nn.Conv3d):
        return (WrittenTensor((2, layer.in_channels, 16, 16, 16)),)
    if (width := input_width(layer)) is not None:
        return WrittenTensor((2, 5, width)), WrittenTensor((2, width))
    return ()


def input_width(layer: nn.Module) -> int | None:
    """The size of the last axis of what a layer reads."""
    if isinstance(layer, (nn.LayerNorm, nn.RMSNorm)):
        return int(layer.normalized_shape[-1])
    for kind, attribute in (
        (nn.Linear, "in_features"),
        (nn.RNNBase, "input_size"),
        (nn.MultiheadAttention, "embed_dim"),
    ):
        if isinstance(layer, kind):
            return int(getattr(layer, attribute))
    return None
