"""What a slim checkpoint holds, as values: read from its config, written to it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Union

VERSION = 2


@dataclass(frozen=True)
class RowGroup:
    """Rows of a linear layer that read the same columns.

    With `heads`, every head's rows also receive some inputs unchanged: the identity block of its matrix. A group of no
    columns is constant.
    """

    rows: int
    columns: int
    heads: int
    bias: bool


@dataclass(frozen=True)
class LinearSpec:
    """A linear layer whose rows are stored in groups; `shuffled` rows are put in order behind them.

    If constant rows are `spare`, nobody reads them. `transposed` is the weight of transformers' Conv1D.
    """

    kind: ClassVar = "linear"
    inputs: int
    outputs: int
    groups: tuple[RowGroup, ...]
    shuffled: bool = False
    transposed: bool = False
    spare: bool = False

    def __post_init__(self) -> None:
        groups = tuple(g if isinstance(g, RowGroup) else RowGroup(**g) for g in self.groups)
        object.__setattr__(self, "groups", groups)

    def is_made(self, group: RowGroup) -> bool:
        """Whether the rows of a group are computed; those that nobody reads are not."""
        return not self.spare or bool(group.columns) or group.bias


@dataclass(frozen=True)
class PlainLinearSpec:
    """nn.Linear, with a bias or without."""

    kind: ClassVar = "plain"
    inputs: int
    outputs: int
    bias: bool


@dataclass(frozen=True)
class EmbeddingSpec:
    """A table without the one column, at `place`, that is zero."""

    kind: ClassVar = "embedding"
    rows: int
    width: int
    padding: int | None
    place: int


@dataclass(frozen=True)
class IdentitySpec:
    """A layer that does nothing any more."""

    kind: ClassVar = "identity"


@dataclass(frozen=True)
class BiasSpec:
    """A convolution that has the shift of the norm behind it as its bias."""

    kind: ClassVar = "bias"
    outputs: int


@dataclass(frozen=True)
class WithoutSpec:
    """A layer whose parameters of these names are constants, and are not stored."""

    kind: ClassVar = "without"
    constants: dict[str, float] = field(default_factory=dict)


LayerSpec = Union[LinearSpec, PlainLinearSpec, EmbeddingSpec, IdentitySpec, BiasSpec, WithoutSpec]  # noqa: UP007
KINDS: dict[str, type[Any]] = {
    spec.kind: spec for spec in (LinearSpec, PlainLinearSpec, EmbeddingSpec, IdentitySpec, BiasSpec, WithoutSpec)
}


@dataclass(frozen=True)
class SlimSpec:
    """How a model is built: the layers by path, and of a compressed one the packings of its attentions."""

    layers: dict[str, LayerSpec] = field(default_factory=dict)
    attention: dict[str, dict[str, Any]] | None = None

    @property
    def stored_otherwise(self) -> list[str]:
        """Layers whose weight is stored in another form, under other names."""
        return [path for path, spec in self.layers.items() if isinstance(spec, (LinearSpec, EmbeddingSpec))]

    def to_json(self) -> dict[str, Any]:
        layers = {path: {"kind": spec.kind, **asdict(spec)} for path, spec in self.layers.items()}
        return {"format": VERSION, "layers": layers} | ({} if self.attention is None else {"attention": self.attention})

    @classmethod
    def from_json(cls, data: Any) -> SlimSpec:
        """Raises ValueError, with what is wrong, for anything that this version did not write."""
        if not isinstance(data, dict) or data.get("format") != VERSION:
            found = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"found a slim checkpoint of format {found!r}; expected {VERSION}: write it again")
        return cls({path: layer_from_json(path, raw) for path, raw in data["layers"].items()}, data.get("attention"))


def layer_from_json(path: str, raw: Any) -> LayerSpec:
    kind = raw.get("kind") if isinstance(raw, dict) else None
    if kind not in KINDS:
        raise ValueError(f"found a layer of kind {kind!r} at {path}; expected one of {', '.join(KINDS)}")
    try:
        spec: LayerSpec = KINDS[kind](**{k: v for k, v in raw.items() if k != "kind"})
    except TypeError as error:
        raise ValueError(f"found a layer at {path} that does not fit its kind, {kind} ({error})") from error
    return spec
