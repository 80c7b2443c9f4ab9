"""The slim layout: from what is known of the parameters to layers that store only the rest."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from deadweight.save.facts import Constant, Fact, IdentityBlocks, Passed, ZeroPlaces, holds, module_of
from deadweight.slim.format import (
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
from deadweight.slim.layers import without
from deadweight.source.private import forward_hooks, forward_pre_hooks, own_parameters

Dense = Callable[[str], Tensor]  # a parameter of the reduced model, whole, by its state-dict name
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def tied_parameters(module: nn.Module) -> set[int]:
    """Parameters that more than one module holds, by identity. A module that is used twice holds its own once."""
    holders = Counter(id(p) for m in module.modules() for p in own_parameters(m).values() if p is not None)
    return {parameter for parameter, count in holders.items() if count > 1}


def can_shrink(module: nn.Module, parameter: str, tied: Collection[int] = (), *, whole: bool) -> str | None:
    """None if the module that holds a parameter can do with less of it; else why it cannot.

    `whole` parameters become constants; of others a row, a column or a block goes. `tied` parameters are stored once
    for all modules that hold them, which must go on to hold them.
    """
    path = module_of(parameter)
    try:
        owner = module.get_submodule(path)
    except AttributeError:
        return "no module holds it"
    kind = type(owner)
    if id(own_parameters(owner).get(parameter.rpartition(".")[2])) in tied:
        return "it is tied to a parameter of another module, and stored once for both"
    in_place = whole and (kind is nn.Linear or not is_linear(owner))
    if not in_place and any(id(p) in tied for p in own_parameters(owner).values()):
        return "its module shares another parameter with a second module: stored apart, the two would cost more"
    if not in_place and has_hooks(owner):
        return "its module has hooks, which a smaller one in its place would not have"
    if is_linear(owner):
        return None
    if not whole:
        plain = kind is nn.Embedding and getattr(owner, "max_norm", None) is None and parameter.endswith(".weight")
        return None if plain else f"its module, {kind.__name__}, cannot store it in a smaller form"
    norm_like = own_parameters(owner).get(parameter.rpartition(".")[2]) is not None and not any(owner.children())
    known = isinstance(owner, (nn.LayerNorm, nn.RMSNorm, *CONVOLUTIONS, *BATCH_NORMS))
    if known or (norm_like and is_scale_only(owner)):
        return None
    return f"its module, {kind.__name__}, expects it"


def acts_like_linear(kind: type[nn.Module]) -> bool:
    """Whether a class of linear layer with a forward of its own computes what nn.Linear does."""
    if getattr(kind, "forward", None) is nn.Linear.forward:
        return kind is nn.Linear
    try:
        with torch.random.fork_rng(devices=[]):
            layer: Any = kind(5, 3)
            layer, x = layer.to(torch.float64), torch.randn(2, 4, 5, dtype=torch.float64)
            return bool(torch.allclose(layer(x), linear(x, layer.weight, layer.bias), rtol=1e-12, atol=1e-12))
    except Exception:  # noqa: BLE001 - the class's own code
        return False


def is_linear(owner: nn.Module) -> bool:
    """A linear layer with a weight of its own: old-style weight norm makes it from two others before every call."""
    if own_parameters(owner).get("weight") is None:
        return False
    return type(owner) is Conv1D or (isinstance(owner, nn.Linear) and acts_like_linear(type(owner)))


def has_hooks(owner: nn.Module) -> bool:
    return bool(forward_hooks(owner) or forward_pre_hooks(owner))


def is_scale_only(owner: nn.Module) -> bool:
    """A norm of somebody's own whose one parameter multiplies: a number can stand in its place.

    Tried out, in two precisions: with all ones and with the number, the result must be the same to the bit.
    """
    names = list(own_parameters(owner))
    if len(names) != 1 or own_parameters(owner)[names[0]] is None:
        return False
    width = own_parameters(owner)[names[0]].numel()  # type: ignore[union-attr]
    for value in (0.0, 1.0):
        for dtype in (torch.float32, torch.bfloat16):
            full = copy.deepcopy(owner).to_empty(device="cpu").to(dtype)
            own_parameters(full)[names[0]] = nn.Parameter(torch.full((width,), value, dtype=dtype))
            short = copy.deepcopy(full)
            without(short, names[0], value)
            x = torch.randn(2, 3, width).to(dtype)
            try:
                a, b = full(x), short(x)
            except Exception:  # noqa: BLE001 - the module's own code: whatever it raises, it needs its parameter
                return False
            if not isinstance(a, Tensor) or a.dtype != b.dtype or not torch.equal(a, b):
                return False
    return True


@dataclass
class Known:
    """All facts about the parameters of one module."""

    constants: dict[str, float] = field(default_factory=dict)
    zero: list[ZeroPlaces] = field(default_factory=list)
    blocks: list[IdentityBlocks] = field(default_factory=list)
    passed: Passed | None = None


def by_module(facts: Iterable[Fact]) -> dict[str, Known]:
    modules: dict[str, Known] = defaultdict(Known)
    for fact in facts:
        if isinstance(fact, Passed):
            modules[fact.module].passed = fact
            continue
        known = modules[module_of(fact.parameter)]
        if isinstance(fact, Constant):
            known.constants[fact.parameter.rpartition(".")[2]] = fact.value
        elif isinstance(fact, ZeroPlaces):
            known.zero.append(fact)
        else:
            known.blocks.append(fact)
    return dict(modules)


@dataclass(frozen=True)
class Layer:
    """The spec of one layer, and where its tensors lie in the whole ones: for every group, rows and columns."""

    spec: LayerSpec
    rows: tuple[tuple[int, ...], ...] = ()
    columns: tuple[tuple[int, ...], ...] = ()
    through: tuple[tuple[int, ...], ...] = ()  # inputs that identity blocks pass on
    shift: str | None = None  # the norm's parameter that becomes the bias

    def tensors(self, path: str, dense: Dense) -> dict[str, Tensor]:
        """What is stored, by its name inside the layer, cut out of the whole parameters."""
        spec = self.spec
        if isinstance(spec, LinearSpec):
            return self.groups(spec, path, dense)
        if isinstance(spec, EmbeddingSpec):
            table = dense(f"{path}.weight")
            return {"table": table[:, [c for c in range(table.shape[1]) if c != spec.place]]}
        if isinstance(spec, (PlainLinearSpec, BiasSpec)):
            result = {"weight": dense(f"{path}.weight")}
            if isinstance(spec, BiasSpec) or spec.bias:
                result["bias"] = dense(self.shift or f"{path}.bias")
            return result
        return {}

    def groups(self, spec: LinearSpec, path: str, dense: Dense) -> dict[str, Tensor]:
        weight = dense(f"{path}.weight")
        weight = weight.T if spec.transposed else weight
        result = {}
        for i, group in enumerate(spec.groups):
            rows, columns = torch.tensor(self.rows[i]), torch.tensor(self.columns[i], dtype=torch.int64)
            if group.columns:
                result[f"weight_{i}"] = weight[rows][:, columns]
            if group.bias:
                result[f"bias_{i}"] = dense(f"{path}.bias")[rows]
            if 0 < group.columns < spec.inputs:
                result[f"columns_{i}"] = columns.to(torch.int32)
            if group.heads:
                result[f"through_{i}"] = torch.tensor(self.through[i], dtype=torch.int32)
        if spec.shuffled:
            made = [r for rows, g in zip(self.rows, spec.groups, strict=True) if spec.is_made(g) for r in rows]
            order = torch.zeros(spec.outputs, dtype=torch.int32)  # what is spare may be anything: the first row
            order[made] = torch.arange(len(made), dtype=torch.int32)
            result["order"] = order
        return result

    def with_spare_rows(self) -> Layer:
        """The same layer where nobody reads the rows of the output that are zero: they need not be made."""
        spec = self.spec
        if not isinstance(spec, LinearSpec) or not any(g.columns for g in spec.groups):
            return self
        spare = replace(spec, spare=True, shuffled=True)
        return replace(self, spec=spare) if not all(map(spare.is_made, spare.groups)) else self


@dataclass(frozen=True)
class Slim:
    """How the layers are stored, by module path, and which parameters of the original they replace."""

    layers: dict[str, Layer]
    facts: tuple[Fact, ...]
    replaces: dict[str, str]  # original parameter or buffer to the module whose slim form holds it now

    @property
    def spec(self) -> SlimSpec:
        return SlimSpec({path: layer.spec for path, layer in self.layers.items()})

    def tensors(self, path: str, dense: Dense) -> dict[str, Tensor]:
        """What is stored for one module, from its whole parameters, of which the facts must be true."""
        for fact in self.facts:
            if not isinstance(fact, Passed) and module_of(fact.parameter) == path:
                assert holds(fact, dense(fact.parameter)), f"{fact} is no longer true"
        return {f"{path}.{name}": value for name, value in self.layers[path].tensors(path, dense).items()}


def layout(module: nn.Module, facts: Iterable[Fact]) -> Slim:
    """The layers of which something is known, each in the smallest form that it can have."""
    layers: dict[str, Layer] = {}
    replaces: dict[str, str] = {}
    facts = tuple(facts)
    for path, known in by_module(facts).items():
        owner = module.get_submodule(path)
        layer = layer_of(owner, known)
        if layer is None:
            continue
        layers[path] = layer
        for name, _ in (*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)):
            if not isinstance(layer.spec, WithoutSpec) or name in layer.spec.constants:
                replaces[f"{path}.{name}"] = path
        if known.passed is not None:
            before = known.passed.before
            layers[before] = with_bias(module.get_submodule(before), path)
            for name, _ in module.get_submodule(before).named_parameters(recurse=False):
                replaces[f"{before}.{name}"] = before
    return Slim(layers, facts, replaces)


def with_bias(owner: nn.Module, norm: str) -> Layer:
    """The layer before a BatchNorm, with the norm's shift as its bias."""
    if isinstance(owner, nn.Linear):
        return Layer(PlainLinearSpec(owner.in_features, owner.out_features, bias=True), shift=f"{norm}.bias")
    return Layer(BiasSpec(owner.out_channels), shift=f"{norm}.bias")  # type: ignore[arg-type]


def layer_of(owner: nn.Module, known: Known) -> Layer | None:
    if known.passed is not None:
        return Layer(IdentitySpec())
    if is_linear(owner):
        return linear_layer(owner, known)
    if type(owner) is nn.Embedding and known.zero:
        (zero,) = known.zero
        return Layer(EmbeddingSpec(owner.num_embeddings, owner.embedding_dim, owner.padding_idx, zero.places[0]))
    return Layer(WithoutSpec(dict(known.constants))) if known.constants else None


def linear_layer(owner: nn.Module, known: Known) -> Layer:
    """Rows with the same columns, the same identity block and the same need of a bias form a group."""
    transposed = isinstance(owner, Conv1D)
    shape = owner.get_parameter("weight").shape
    outputs, inputs = (shape[1], shape[0]) if transposed else (shape[0], shape[1])
    has_bias = owner.bias is not None and "bias" not in known.constants
    if type(owner) is nn.Linear and set(known.constants) == {"bias"} and not known.zero and not known.blocks:
        return Layer(WithoutSpec(dict(known.constants)))  # its weight stays what it is, tied or not
    if not transposed and not known.zero and not known.blocks:
        return Layer(PlainLinearSpec(inputs, outputs, has_bias))
    out_axis = 1 if transposed else 0
    rows = Rows(outputs, inputs, has_bias)
    for zero in known.zero:
        if zero.parameter.endswith(".bias"):
            rows.no_bias(zero.places)
        elif zero.axis == out_axis:
            rows.no_columns(zero.places)
        else:
            rows.drop_columns(zero.places, zero.others)
    for block in known.blocks:
        rows.lay(block)
    return rows.layer(transposed)


class Rows:
    """What is stored of each row of a linear map."""

    def __init__(self, outputs: int, inputs: int, bias: bool) -> None:
        self.outputs, self.inputs = outputs, inputs
        self.bias = [bias] * outputs
        self.dropped: list[frozenset[int]] = [frozenset()] * outputs
        self.constant = [False] * outputs
        self.block: list[int] = [-1] * outputs  # which identity it belongs to
        self.blocks: list[IdentityBlocks] = []

    def no_bias(self, places: Iterable[int]) -> None:
        for p in places:
            self.bias[p] = False

    def no_columns(self, places: Iterable[int]) -> None:
        for p in places:
            self.constant[p] = True

    def drop_columns(self, places: Iterable[int], rows: Iterable[int] | None) -> None:
        for r in range(self.outputs) if rows is None else rows:
            self.dropped[r] = self.dropped[r] | frozenset(places)

    def lay(self, block: IdentityBlocks) -> None:
        self.blocks.append(block)
        for rows in block.blocks:
            for r in rows:
                self.block[r] = len(self.blocks) - 1
                self.dropped[r] = self.dropped[r] | frozenset(block.columns)

    def layer(self, transposed: bool) -> Layer:
        groups: dict[tuple[frozenset[int], int, bool], list[int]] = {}
        for r in self.sequence():
            dropped = frozenset(range(self.inputs)) if self.constant[r] else self.dropped[r]
            groups.setdefault((dropped, self.block[r], self.bias[r]), []).append(r)
        order = [r for rows in groups.values() for r in rows]
        stored = tuple(
            RowGroup(len(rows), self.inputs - len(dropped), self.heads(block, rows), bias)
            for (dropped, block, bias), rows in groups.items()
        )
        return Layer(
            LinearSpec(self.inputs, self.outputs, stored, shuffled=order != sorted(order), transposed=transposed),
            rows=tuple(map(tuple, groups.values())),
            columns=tuple(tuple(sorted(set(range(self.inputs)) - dropped)) for dropped, _, _ in groups),
            through=tuple(self.blocks[block].columns if block >= 0 else () for _, block, _ in groups),
        )

    def sequence(self) -> list[int]:
        """Rows in their order, those of identity blocks block by block."""
        laid = [r for b in self.blocks for rows in b.blocks for r in rows]
        inside = set(laid)
        first = [r for r in range(self.outputs) if r not in inside]
        return sorted(first + laid, key=self.place(laid).__getitem__)

    def place(self, laid: list[int]) -> dict[int, tuple[int, int]]:
        position = {r: (min(laid), i) for i, r in enumerate(laid)} if laid else {}
        return {r: position.get(r, (r, 0)) for r in range(self.outputs)}

    def heads(self, block: int, rows: list[int]) -> int:
        if block < 0:
            return 0
        size = len(self.blocks[block].columns)
        assert len(rows) % size == 0, "an identity block whose rows differ in their biases"
        return len(rows) // size
