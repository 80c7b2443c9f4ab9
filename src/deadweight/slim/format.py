"""The contents of a slim checkpoint as frozen values, read from its config and written to it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Union

from .codes import LOW_BITS, SHIFT, UNIT, WIDEST, in_low_half

VERSION = 6
SIGN = "deadweight_slim_checkpoint__load_it_with_trust_remote_code"  # an empty tensor's name, for error messages
LARGEST_COUNT = 1 << 20  # of heads, or of numbers that are coded together
SPARE_UNITS = 8  # by which a row may have more units than numbers: units come in eights
MOST_FIRST = 1024  # uncoded tokens at the start of a sequence
MOST_FIELDS = 8  # codes in a unit
READERS = ("codes", "states", "own attention")  # what reads a coded cache


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
    """A linear layer whose rows are stored in groups; `shuffled` rows are put in order afterwards.

    `transposed` is the weight of transformers' Conv1D.
    """

    kind: ClassVar = "linear"
    inputs: int
    outputs: int
    groups: tuple[RowGroup, ...]
    shuffled: bool = False
    transposed: bool = False

    def __post_init__(self) -> None:
        groups = tuple(g if isinstance(g, RowGroup) else RowGroup(**g) for g in self.groups)
        object.__setattr__(self, "groups", groups)


@dataclass(frozen=True)
class PlainLinearSpec:
    """nn.Linear, with a bias or without."""

    kind: ClassVar = "plain"
    inputs: int
    outputs: int
    bias: bool


@dataclass(frozen=True)
class EmbeddingSpec:
    """An embedding table without its one zero column, at `place`."""

    kind: ClassVar = "embedding"
    rows: int
    width: int
    padding: int | None
    place: int


@dataclass(frozen=True)
class IdentitySpec:
    """A layer that is now the identity."""

    kind: ClassVar = "identity"


@dataclass(frozen=True)
class BiasSpec:
    """A layer with a bias that its class does not have: a norm's shift, or the means of dropped values."""

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


def expect_counts(**numbers: Any) -> None:
    """Raise ValueError unless all numbers are counts: the file may come from anywhere."""
    for name, number in numbers.items():
        if type(number) is not int or not 0 <= number < LARGEST_COUNT:
            raise ValueError(f"found {name} = {number!r}; expected a whole number from 0 on")


@dataclass(frozen=True)
class UnitRun:
    """Neighbouring 16-bit units of a row with the same bit widths of their codes."""

    count: int
    widths: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "widths", tuple(self.widths))
        expect_counts(count=self.count, **{f"width {i}": w for i, w in enumerate(self.widths)})


@dataclass(frozen=True)
class CacheSpec:
    """The coded cache of one attention: for every token, each set of key heads has a row of units and a scale.

    A unit holds `key_fields` codes of keys, and then `value_fields` codes that correct the values predicted from the
    codes of keys. If the attention is `joint`, its keys and values are coded as one vector, and there are no codes of
    values. `sets` describes the units of a row, which are equally many for every set of heads. `pairs` pairs of
    dimensions of every key head are rotated by RoPE; keys are coded before that. The first `first` tokens of a sequence
    are not coded.

    The `reader` of the cache is an attention that reads "codes"; or the model's own code, which reads decoded "states"
    (`decoded_states.py`) and may also have its "own attention", beside transformers' interface. Then keys and values
    are the two tensors that the model caches, whatever they are, and `heads` is the number of cached heads. Keys are
    the tensor with rotary positions, which may be the second (`rotated_second`). Every cached head may stand for
    `copies` equal ones, of which one is stored.
    """

    heads: int
    key_heads: int
    d_qk: int
    d_v: int
    pairs: int
    first: int
    key_fields: int
    value_fields: int
    sets: tuple[tuple[UnitRun, ...], ...]
    reader: str = "codes"
    rotated_second: bool = False
    copies: int = 1

    def __post_init__(self) -> None:
        runs = [[r if isinstance(r, UnitRun) else UnitRun(**r) for r in own] for own in self.sets]
        object.__setattr__(self, "sets", tuple(tuple(own) for own in runs))

    @classmethod
    def from_json(cls, path: str, raw: Any) -> CacheSpec:
        try:
            spec = cls(**raw)
            spec.expect_fitting()
            return spec
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"found a cache at {path} that does not fit its format ({error})") from error

    def expect_fitting(self) -> None:
        """Raise ValueError if the numbers of an attention are inconsistent."""
        expect_counts(
            heads=self.heads, key_heads=self.key_heads, d_qk=self.d_qk, d_v=self.d_v, pairs=self.pairs, first=self.first
        )
        expect_counts(key_fields=self.key_fields, value_fields=self.value_fields, copies=self.copies)
        if self.reader not in READERS or type(self.rotated_second) is not bool or not self.copies:
            raise ValueError(f"reader {self.reader!r}, second rotated {self.rotated_second!r}, {self.copies} copies")
        sets = len(self.sets)
        if not sets or not self.key_heads or self.heads % self.key_heads or self.key_heads % sets:
            raise ValueError(f"{self.heads} heads, {self.key_heads} of keys, in {sets} sets")
        if 2 * self.pairs > self.d_qk or self.first > MOST_FIRST:
            raise ValueError(f"{self.pairs} pairs of {self.d_qk} dimensions, and {self.first} first tokens")
        if not self.key_fields or self.key_fields + self.value_fields > MOST_FIELDS:
            raise ValueError(f"{self.key_fields} and {self.value_fields} codes in a unit")
        if len({sum(run.count for run in own) for own in self.sets}) != 1 or not 0 < self.n_units < LARGEST_COUNT:
            raise ValueError("rows of different sets that are not equally long")
        if sets * self.n_units > LARGEST_COUNT or self.n_units > self.set_keys + self.set_values + SPARE_UNITS:
            raise ValueError(f"{self.n_units} units for {self.set_keys} and {self.set_values} numbers, in {sets} sets")
        for run in {run for own in self.sets for run in own}:
            self.expect_unit(run.widths)

    def expect_unit(self, widths: tuple[int, ...]) -> None:
        low = [w for w, is_low in zip(widths, in_low_half(self.key_fields, self.value_fields), strict=False) if is_low]
        full = max(sum(low), SHIFT) + sum(widths) - sum(low)
        if len(widths) != self.key_fields + self.value_fields or max(widths) > WIDEST:
            raise ValueError(f"units with codes of {widths} bits")
        if sum(low) > LOW_BITS or full > UNIT:
            raise ValueError(f"units of {full} bits, {sum(low)} of them in the lower half")

    @property
    def joint(self) -> bool:
        """Whether keys and values are transformed as one vector."""
        return self.value_fields == 0

    @property
    def n_sets(self) -> int:
        return len(self.sets)

    @property
    def n_units(self) -> int:
        """Units per row."""
        return sum(run.count for run in self.sets[0])

    @property
    def widths(self) -> list[list[tuple[int, ...]]]:
        """The bits of the codes of every unit of every set."""
        return [[run.widths for run in own for _ in range(run.count)] for own in self.sets]

    @property
    def set_keys(self) -> int:
        """Key dimensions of a set, over all its heads."""
        return self.key_heads * self.d_qk // self.n_sets

    @property
    def set_values(self) -> int:
        return self.key_heads * self.d_v // self.n_sets

    @property
    def inputs(self) -> int:
        """Dimensions that the first stage transforms."""
        return self.set_keys + (self.set_values if self.joint else 0)

    @property
    def token_bytes(self) -> int:
        """Bytes per token: the units of every set, and one byte for its scale."""
        return self.n_sets * (2 * self.n_units + 1)

    def bytes_at(self, tokens: int, precision: int = 2) -> int:
        """Bytes of a sequence of this many tokens, uncoded ones included."""
        kept = min(self.first, tokens) * self.key_heads * (self.d_qk + self.d_v) * precision
        return tokens * self.token_bytes + kept

    def bytes_before(self, tokens: int, precision: int = 2) -> int:
        return tokens * self.key_heads * (self.d_qk + self.d_v) * precision


@dataclass(frozen=True)
class HeadsSpec:
    """Smaller heads of one attention: the number of key and value dimensions that every key head keeps.

    The first dimensions are kept, unless those of keys are `listed`: then a tensor lists them.
    """

    heads: int
    key_heads: int
    d_qk: int
    d_v: int
    keys: tuple[int, ...]
    values: tuple[int, ...]
    listed: bool = False

    @classmethod
    def from_json(cls, path: str, raw: Any) -> HeadsSpec:
        try:
            spec = cls(**{**raw, "keys": tuple(raw["keys"]), "values": tuple(raw["values"])})
            spec.expect_fitting()
            return spec
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"found heads at {path} that do not fit their format ({error})") from error

    def expect_fitting(self) -> None:
        """Raise ValueError if the numbers of an attention are inconsistent."""
        expect_counts(heads=self.heads, key_heads=self.key_heads, d_qk=self.d_qk, d_v=self.d_v)
        if not self.key_heads or self.heads % self.key_heads:
            raise ValueError(f"{self.heads} heads that share {self.key_heads} of keys")
        for name, kept, whole in (("keys", self.keys, self.d_qk), ("values", self.values, self.d_v)):
            expect_counts(**{f"{name} {i}": n for i, n in enumerate(kept)})
            if len(kept) != self.key_heads or not all(0 < n <= whole for n in kept):
                raise ValueError(f"{name} {kept} of {self.key_heads} key heads of {whole} dimensions")
        if type(self.listed) is not bool:
            raise ValueError(f"listed = {self.listed!r}, which is neither true nor false")


@dataclass(frozen=True)
class SlimSpec:
    """How a slim model is built: its layers, smaller heads and coded caches, by module path."""

    layers: dict[str, LayerSpec] = field(default_factory=dict)
    heads: dict[str, HeadsSpec] = field(default_factory=dict)
    caches: dict[str, CacheSpec] = field(default_factory=dict)

    @property
    def layers_in_other_form(self) -> list[str]:
        """Layers whose weights are stored in another form, under other names."""
        return [path for path, spec in self.layers.items() if isinstance(spec, (LinearSpec, EmbeddingSpec))]

    def to_json(self) -> dict[str, Any]:
        layers = {path: {"kind": spec.kind, **asdict(spec)} for path, spec in self.layers.items()}
        heads = {path: asdict(spec) for path, spec in self.heads.items()}
        caches = {path: asdict(spec) for path, spec in self.caches.items()}
        parts = {"heads": heads, "caches": caches}
        return {"format": VERSION, "layers": layers, **{name: part for name, part in parts.items() if part}}

    @classmethod
    def from_json(cls, data: Any) -> SlimSpec:
        """Raises ValueError, with the reason, for anything that this version did not write."""
        if not isinstance(data, dict) or data.get("format") != VERSION:
            version = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"found a slim checkpoint of format {version!r}; expected {VERSION}: write it again")
        layers = {path: layer_from_json(path, raw) for path, raw in data["layers"].items()}
        heads = {path: HeadsSpec.from_json(path, raw) for path, raw in data.get("heads", {}).items()}
        caches = {path: CacheSpec.from_json(path, raw) for path, raw in data.get("caches", {}).items()}
        return cls(layers, heads, caches)


def layer_from_json(path: str, raw: Any) -> LayerSpec:
    kind = raw.get("kind") if isinstance(raw, dict) else None
    if kind not in KINDS:
        raise ValueError(f"found a layer of kind {kind!r} at {path}; expected one of {', '.join(KINDS)}")
    try:
        spec: LayerSpec = KINDS[kind](**{k: v for k, v in raw.items() if k != "kind"})
    except TypeError as error:
        raise ValueError(f"found a layer at {path} that does not fit its kind, {kind} ({error})") from error
    return spec
