"""The slim layout: layers that store only those numbers that the facts about their parameters do not give."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

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
from deadweight.slim.layers import CONVOLUTIONS, without
from deadweight.source.private_api import forward_hooks, forward_pre_hooks, own_parameters

Dense = Callable[[str], Tensor]  # a whole parameter of the reduced model, by its state-dict name
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def tied_parameters(module: nn.Module) -> set[int]:
    """The ids of parameters that more than one module holds. A module that is used twice counts once."""
    holders = Counter(id(p) for m in module.modules() for p in own_parameters(m).values() if p is not None)
    return {parameter for parameter, count in holders.items() if count > 1}


def can_shrink(module: nn.Module, parameter: str, tied: Collection[int] = (), *, whole: bool) -> str | None:
    """None if the module that holds a parameter can store less of it; else the reason why not.

    `whole` parameters become constants; others lose a row, a column or a block. `tied` parameters, by id, are stored
    once for all modules that hold them, and stay in all of them.
    """
    path = module_of(parameter)
    try:
        owner = module.get_submodule(path)
    except AttributeError:
        return "no module holds it"
    kind = type(owner)
    if id(own_parameters(owner).get(parameter.rpartition(".")[2])) in tied:
        return "it is tied to a parameter of another module: the two are stored once"
    in_place = whole and (kind is nn.Linear or not is_linear(owner))
    if not in_place and any(id(p) in tied for p in own_parameters(owner).values()):
        return "its module shares another parameter with a second module: stored separately, they would take more space"
    if not in_place and has_hooks(owner):
        return "its module has hooks, which a smaller module in its place would lose"
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
    """Whether a subclass of nn.Linear with its own forward computes what nn.Linear computes."""
    if getattr(kind, "forward", None) is nn.Linear.forward:
        return kind is nn.Linear
    try:
        with torch.random.fork_rng(devices=[]):
            layer, x = kind(5, 3).to(torch.float64), torch.randn(2, 4, 5, dtype=torch.float64)
            expected = linear(x, layer.get_parameter("weight"), own_parameters(layer).get("bias"))
            return bool(torch.allclose(layer(x), expected, rtol=1e-12, atol=1e-12))
    except Exception:  # noqa: BLE001 - the class's own code
        return False


def is_linear(owner: nn.Module) -> bool:
    """A linear layer whose weight is a parameter: old-style weight norm computes it from two others at every call."""
    if own_parameters(owner).get("weight") is None:
        return False
    return type(owner) is Conv1D or (isinstance(owner, nn.Linear) and acts_like_linear(type(owner)))


def has_hooks(owner: nn.Module) -> bool:
    return bool(forward_hooks(owner) or forward_pre_hooks(owner))


def is_scale_only(owner: nn.Module) -> bool:
    """A custom norm whose only parameter is a factor, so that a number can replace it.

    This is tested in two precisions: the result with a constant vector and with the number must be bitwise the same.
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
            except Exception:  # noqa: BLE001 - the module's own code: it cannot do without its parameter
                return False
            if not isinstance(a, Tensor) or a.dtype != b.dtype or not torch.equal(a, b):
                return False
    return True


@dataclass
class ModuleFacts:
    """All facts about the parameters of one module."""

    constants: dict[str, float] = field(default_factory=dict)
    zero: list[ZeroPlaces] = field(default_factory=list)
    blocks: list[IdentityBlocks] = field(default_factory=list)
    passed: Passed | None = None


def by_module(facts: Iterable[Fact]) -> dict[str, ModuleFacts]:
    modules: dict[str, ModuleFacts] = defaultdict(ModuleFacts)
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
class SlimLayer:
    """The spec of one layer, and which rows and columns of the whole tensors each of its groups stores."""

    spec: LayerSpec
    rows: tuple[tuple[int, ...], ...] = ()
    columns: tuple[tuple[int, ...], ...] = ()
    through: tuple[tuple[int, ...], ...] = ()  # the inputs that identity blocks copy to the output
    shift: str | None = None  # the norm's parameter that becomes the bias

    def tensors(self, path: str, dense: Dense) -> dict[str, Tensor]:
        """The stored tensors by their names inside the layer, sliced from the whole parameters."""
        spec = self.spec
        if isinstance(spec, LinearSpec):
            return self.groups(spec, path, dense)
        if isinstance(spec, EmbeddingSpec):
            table = dense(f"{path}.weight")
            return {"table": table[:, [c for c in range(table.shape[1]) if c != spec.place]]}
        if isinstance(spec, (PlainLinearSpec, BiasSpec)):
            has_bias = isinstance(spec, BiasSpec) or spec.bias
            bias = {"bias": dense(self.shift or f"{path}.bias")} if has_bias else {}
            return {"weight": dense(f"{path}.weight"), **bias}
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
            made = [row for rows in self.rows for row in rows]
            order = torch.zeros(spec.outputs, dtype=torch.int32)
            order[made] = torch.arange(len(made), dtype=torch.int32)
            result |= {"order": order}
        return result


@dataclass(frozen=True)
class Slim:
    """How the layers are stored, by module path, and which parameters of the original they replace."""

    layers: dict[str, SlimLayer]
    facts: tuple[Fact, ...]
    replaces: dict[str, str]  # original parameter or buffer to the module whose slim form holds it now

    @property
    def spec(self) -> SlimSpec:
        return SlimSpec({path: layer.spec for path, layer in self.layers.items()})

    def tensors(self, path: str, dense: Dense) -> dict[str, Tensor]:
        """The stored tensors of one module, from its whole parameters, for which the facts must hold."""
        for fact in self.facts:
            if not isinstance(fact, Passed) and module_of(fact.parameter) == path:
                assert holds(fact, dense(fact.parameter)), f"{fact} does not hold"
        return {f"{path}.{name}": value for name, value in self.layers[path].tensors(path, dense).items()}


def layout(module: nn.Module, facts: Iterable[Fact]) -> Slim:
    """The layers about which there are facts, each in its smallest form."""
    layers: dict[str, SlimLayer] = {}
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


def with_bias(owner: nn.Module, norm: str) -> SlimLayer:
    """The layer before a BatchNorm, with the norm's shift as its bias."""
    if isinstance(owner, nn.Linear):
        return SlimLayer(PlainLinearSpec(owner.in_features, owner.out_features, bias=True), shift=f"{norm}.bias")
    return SlimLayer(BiasSpec(owner.out_channels), shift=f"{norm}.bias")  # type: ignore[arg-type]


def layer_of(owner: nn.Module, known: ModuleFacts) -> SlimLayer | None:
    if known.passed is not None:
        return SlimLayer(IdentitySpec())
    if is_linear(owner):
        return linear_layer(owner, known)
    if type(owner) is nn.Embedding and known.zero:
        (zero,) = known.zero
        return SlimLayer(EmbeddingSpec(owner.num_embeddings, owner.embedding_dim, owner.padding_idx, zero.places[0]))
    return SlimLayer(WithoutSpec(dict(known.constants))) if known.constants else None


def linear_layer(owner: nn.Module, known: ModuleFacts) -> SlimLayer:
    """Rows with the same columns, the same identity block and the same kind of bias form a group."""
    transposed = isinstance(owner, Conv1D)
    shape = owner.get_parameter("weight").shape
    outputs, inputs = (shape[1], shape[0]) if transposed else (shape[0], shape[1])
    has_bias = owner.bias is not None and "bias" not in known.constants
    if type(owner) is nn.Linear and set(known.constants) == {"bias"} and not known.zero and not known.blocks:
        return SlimLayer(WithoutSpec(dict(known.constants)))  # its weight stays as it is, tied or not
    if not transposed and not known.zero and not known.blocks:
        return SlimLayer(PlainLinearSpec(inputs, outputs, has_bias))
    out_axis = 1 if transposed else 0
    rows = LinearRows(outputs, inputs, has_bias)
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


class LinearRows:
    """What is stored of each row of a linear map."""

    def __init__(self, outputs: int, inputs: int, bias: bool) -> None:
        self.outputs, self.inputs = outputs, inputs
        self.bias = [bias] * outputs
        self.dropped: list[frozenset[int]] = [frozenset()] * outputs
        self.constant = [False] * outputs
        self.block: list[int] = [-1] * outputs  # the number of its identity block; −1: none
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

    def layer(self, transposed: bool) -> SlimLayer:
        groups: dict[tuple[frozenset[int], int, bool], list[int]] = {}
        for r in self.sequence():
            dropped = frozenset(range(self.inputs)) if self.constant[r] else self.dropped[r]
            groups.setdefault((dropped, self.block[r], self.bias[r]), []).append(r)
        order = [r for rows in groups.values() for r in rows]
        stored = tuple(
            RowGroup(len(rows), self.inputs - len(dropped), self.heads(block, rows), bias)
            for (dropped, block, bias), rows in groups.items()
        )
        return SlimLayer(
            LinearSpec(self.inputs, self.outputs, stored, shuffled=order != sorted(order), transposed=transposed),
            rows=tuple(map(tuple, groups.values())),
            columns=tuple(tuple(sorted(set(range(self.inputs)) - dropped)) for dropped, _, _ in groups),
            through=tuple(self.blocks[block].columns if block >= 0 else () for _, block, _ in groups),
        )

    def sequence(self) -> list[int]:
        """All rows in their order, except that rows of identity blocks come block by block."""
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
