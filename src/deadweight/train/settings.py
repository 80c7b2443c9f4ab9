"""The settings of a training run, from a TOML file or from flags. Every key is checked before any work is done.

Nothing here imports torch: a mistake in a file is reported at once.

Why not pydantic: an error must be one line with the key, its value and what was expected, or the table or spelling that
was probably meant. pydantic's errors take several lines each, and would all have to be written again.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from deadweight.errors import DeadweightError
from deadweight.source.printable import printable
from deadweight.source.type_aliases import Setting
from deadweight.transformer.shape import BIASES, PER_LAYER, TransformerShape, check

if TYPE_CHECKING:
    from deadweight.transformer import TransformerConfig

Table: TypeAlias = dict[str, Setting]  # of a TOML file
Settings = TypeVar("Settings", "Data", "Train")


@dataclass(frozen=True)
class Data:
    """The text, and the tokenizer."""

    text: str = "embedded"  # a file (also .gz, .bz2, .xz), a folder of .txt and .md, datasets:NAME, or embedded
    valid: str | None = None  # validation text; by default the end of the text
    valid_share: float = 0.05  # of the text, where there is no validation text
    tokenizer: str = "bytes"  # bytes, a tokenizer.json or its folder, or bpe:SIZE to train one on the text


@dataclass(frozen=True)
class Train:
    """The optimisation. One step sees batch × accumulate sequences, over all processes together."""

    steps: int = 600
    batch: int = 32
    accumulate: int = 1
    optimizer: str = "adamw"  # or muon: orthogonal updates for the matrices of the layers, AdamW for the rest
    learning_rate: float = 1e-3
    final_share: float = 0.1  # of the learning rate, at the end
    warmup: int = 50
    schedule: str = "cosine"  # or wsd: warm-up, constant, then a linear decay over the last decay_share of the steps
    decay_share: float = 0.2
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    seed: int = 0
    precision: str = "auto"  # fp32 or bf16; auto is bf16 on a GPU
    compile: bool | None = None  # None: on a GPU only
    evaluate_every: int = 100
    evaluate_tokens: int = 200_000  # at most, each time; the last evaluation reads the whole validation text
    save_every: int = 200
    log_every: int = 10
    tensorboard: bool = False


TABLES = {
    "model": tuple(f.name for f in dataclasses.fields(TransformerShape) if f.name != "token_types"),
    "data": tuple(f.name for f in dataclasses.fields(Data)),
    "train": tuple(f.name for f in dataclasses.fields(Train)),
}  # the keys of each table of a file


@dataclass(frozen=True)
class Run:
    """A whole training run."""

    model: Table = field(default_factory=dict)
    data: Data = field(default_factory=Data)
    train: Train = field(default_factory=Train)

    def shape(self, vocabulary: int = 256) -> TransformerShape:
        """The model's shape, checked, for a tokenizer with this many tokens."""
        shape = TransformerShape(**{**self.model, "vocab_size": self.model.get("vocab_size") or vocabulary})
        try:
            check(shape)
        except (ValueError, TypeError) as error:
            raise DeadweightError(f"[model] cannot be built: {error}") from error
        return shape

    def config(self, vocabulary: int) -> TransformerConfig:
        """The model's config; its vocabulary is the tokenizer's, or a larger one that [model] asks for. An encoder has
        one more token, its last: the mask."""
        from deadweight.transformer import TransformerConfig

        mask = "" if self.shape().causal else " and a mask"
        vocabulary += bool(mask)
        if self.shape(vocabulary).vocab_size < vocabulary:
            raise DeadweightError(
                f"found vocab_size = {self.model.get('vocab_size')}; expected at least {vocabulary}: the tokenizer's "
                f"tokens{mask}"
            )
        return TransformerConfig(**{**self.model, "vocab_size": self.shape(vocabulary).vocab_size})


def read_run(file: str | Path) -> Run:
    """A run from a TOML file with the tables [model], [data] and [train]."""
    return make_run(read_toml(file), where=f"{printable(file)}: ")


def read_toml(file: str | Path) -> Table:
    try:
        return tomllib.loads(Path(file).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise DeadweightError(f"{printable(file)} cannot be read ({error.strerror or error})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DeadweightError(f"{printable(file)} is not valid TOML: {error}") from error


def make_run(tables: Mapping[str, Setting], where: str = "") -> Run:
    """A checked run from nested tables; a shape that cannot be built is an error here, before any work is done."""
    check_names(tables, tuple(TABLES), "table", where)
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise DeadweightError(f"{where}found {name} = {table!r}; expected a table [{name}]")
        check_keys(name, table, where)
    run = Run(
        {k: normalise(k, v) for k, v in tables.get("model", {}).items()},
        make_settings(Data, tables.get("data", {}), f"{where}[data] "),
        make_settings(Train, tables.get("train", {}), f"{where}[train] "),
    )
    check_train(run.train, f"{where}[train] ")
    check_data(run.data, f"{where}[data] ")
    try:
        run.shape()
    except DeadweightError as error:
        raise DeadweightError(f"{where}{error}") from error
    return run


def normalise(key: str, value: Setting) -> Setting:
    """`biases` as a list of names, and values per layer as lists."""
    if key == "biases" and isinstance(value, (bool, str)):
        return {"all": list(BIASES), True: list(BIASES), "none": [], False: []}.get(value, [value])
    return list(value) if key in PER_LAYER and isinstance(value, tuple) else value


def check_keys(name: str, table: Mapping[str, Setting], where: str) -> None:
    """Raise for keys that do not belong in this table, and name the table in which they do."""
    for key in table:
        other = next((t for t, keys in TABLES.items() if t != name and key in keys), None)
        if other is not None and key not in TABLES[name]:
            raise DeadweightError(f"{where}found {key} in [{name}]; expected it in [{other}]")
    check_names(table, TABLES[name], "key", f"{where}[{name}] ")


def check_names(table: Mapping[str, Setting], expected: Sequence[str], what: str, where: str = "") -> None:
    for key in table:
        if key not in expected:
            close = get_close_matches(key, expected, 1)
            hint = f"; did you mean {close[0]}?" if close else f"; expected one of {', '.join(expected)}"
            raise DeadweightError(f"{where}unknown {what} {printable(key)}{hint}")


def make_settings(kind: type[Settings], table: Mapping[str, Setting], where: str) -> Settings:
    """A dataclass from a table whose values have the declared types."""
    fields = {f.name: f for f in dataclasses.fields(kind)}
    for key, value in table.items():
        wanted = str(fields[key].type).replace("| None", "").strip()
        fits = {
            "int": isinstance(value, int) and not isinstance(value, bool),
            "float": isinstance(value, (int, float)) and not isinstance(value, bool),
            "bool": isinstance(value, bool),
            "str": isinstance(value, str),
        }[wanted]
        if not fits and not (value is None and "None" in str(fields[key].type)):
            raise DeadweightError(f"{where}found {key} = {value!r}; expected {WORDS[wanted]}")
    return kind(**table)


WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text in quotes"}


def check_train(train: Train, where: str) -> None:
    for key in ("steps", "batch", "accumulate", "evaluate_every", "evaluate_tokens", "save_every", "log_every"):
        require(getattr(train, key) > 0, where, key, train, "a number above zero")
    for key in ("warmup", "weight_decay", "seed"):
        require(getattr(train, key) >= 0, where, key, train, "zero or more")
    for key in ("learning_rate", "clip"):
        require(0 < getattr(train, key) < float("inf"), where, key, train, "a number above zero")
    for key in ("beta1", "beta2"):
        require(0 <= getattr(train, key) < 1, where, key, train, "a number from 0 up to, but not including, 1")
    require(0 <= train.final_share <= 1, where, "final_share", train, "a number from 0 to 1")
    require(train.seed < 1 << 63, where, "seed", train, "a number below 2⁶³")
    require(0 < train.decay_share <= 1, where, "decay_share", train, "a number above 0, at most 1")
    require(train.schedule in ("cosine", "wsd"), where, "schedule", train, "cosine or wsd")
    require(train.optimizer in ("adamw", "muon"), where, "optimizer", train, "adamw or muon")
    require(train.precision in ("auto", "fp32", "bf16"), where, "precision", train, "auto, fp32 or bf16")


def check_data(data: Data, where: str) -> None:
    require(0 < data.valid_share < 1, where, "valid_share", data, "a number between 0 and 1")


def require(holds: bool, where: str, key: str, table: Data | Train, expected: str) -> None:
    if not holds:
        raise DeadweightError(f"{where}found {key} = {getattr(table, key)!r}; expected {expected}")


def as_toml(run: Run) -> str:
    """The run as a file that `read_run` reads back."""
    import tomli_w  # only where a run is written: training needs torch and transformers alone

    tables = {"model": run.model, "data": changed_settings(run.data), "train": changed_settings(run.train)}
    return tomli_w.dumps({name: {k: v for k, v in table.items() if v is not None} for name, table in tables.items()})


def changed_settings(settings: Data | Train) -> Table:
    """The settings that differ from their defaults."""
    default = type(settings)()
    return {k: v for k, v in dataclasses.asdict(settings).items() if v != getattr(default, k)}
