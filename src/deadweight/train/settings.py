"""What a training run is made of, from a TOML file or from flags; every key is checked before any work is done."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeAlias

from deadweight.errors import DeadweightError
from deadweight.source.kinds import Setting
from deadweight.source.text import printable
from deadweight.transformer import TransformerConfig
from deadweight.transformer.configuration import BIASES, PER_LAYER

NOT_OURS = ("use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "token_types")
MODEL_KEYS = tuple(
    name
    for name in TransformerConfig.__annotations__
    if name not in NOT_OURS and not str(TransformerConfig.__annotations__[name]).startswith("ClassVar")
)

Table: TypeAlias = dict[str, Setting]  # of a TOML file


@dataclass(frozen=True)
class Data:
    """The text, and how it becomes tokens."""

    text: str = "embedded"  # a file (also .gz, .bz2, .xz), a folder of .txt and .md, datasets:NAME, or embedded
    valid: str | None = None  # text to judge by; by default the end of the text
    valid_share: float = 0.05
    tokenizer: str = "bytes"  # bytes, a tokenizer.json or its folder, or bpe:SIZE to train one on the text


@dataclass(frozen=True)
class Train:
    """How the weights are found. One step sees batch × accumulate sequences, over all processes together."""

    steps: int = 600
    batch: int = 32
    accumulate: int = 1
    learning_rate: float = 1e-3
    final_share: float = 0.1  # of the learning rate, at the end
    warmup: int = 50
    schedule: str = "cosine"  # or wsd: warm up, stay, and fall over the last decay_share of the steps
    decay_share: float = 0.2
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    seed: int = 0
    precision: str = "auto"  # fp32 or bf16; auto is bf16 on a GPU
    compile: bool | None = None  # None: on a GPU
    evaluate_every: int = 100
    evaluate_tokens: int = 200_000  # at most, each time; the last evaluation reads all
    save_every: int = 200
    log_every: int = 10
    tensorboard: bool = False


@dataclass(frozen=True)
class Run:
    """A whole training run."""

    model: Table = field(default_factory=dict)
    data: Data = field(default_factory=Data)
    train: Train = field(default_factory=Train)

    def config(self, vocabulary: int) -> TransformerConfig:
        """The model's shape; the tokenizer decides how many tokens there are."""
        asked = self.model.get("vocab_size")
        if asked is not None and asked < vocabulary:
            raise DeadweightError(f"found vocab_size = {asked}; expected at least the tokenizer's {vocabulary}")
        try:
            return TransformerConfig(**{**self.model, "vocab_size": asked or vocabulary})
        except (ValueError, TypeError) as error:
            raise DeadweightError(f"[model] cannot be built: {error}") from error


def read_run(file: str | Path) -> Run:
    """A run from a TOML file with the tables [model], [data] and [train]."""
    return make_run(read_toml(file), where=f"{printable(file)}: ")


def read_toml(file: str | Path) -> Table:
    try:
        return tomllib.loads(Path(file).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise DeadweightError(f"{printable(file)} cannot be read ({error.strerror or error})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DeadweightError(f"{printable(file)} is no TOML: {error}") from error


def make_run(tables: Mapping[str, Setting], where: str = "") -> Run:
    """A checked run from nested tables; the shape is built once, so that nothing impossible waits in the queue."""
    known(tables, ("model", "data", "train"), "table", where)
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise DeadweightError(f"{where}found {name} = {table!r}; expected a table [{name}]")
    model = dict(tables.get("model", {}))
    known(model, MODEL_KEYS, "key", f"{where}[model] ")
    run = Run(
        {k: normal(k, v) for k, v in model.items()},
        made(Data, tables.get("data", {}), f"{where}[data] "),
        made(Train, tables.get("train", {}), f"{where}[train] "),
    )
    check_train(run.train, f"{where}[train] ")
    check_data(run.data, f"{where}[data] ")
    run.config(run.model.get("vocab_size") or 256)
    return run


def normal(key: str, value: Setting) -> Setting:
    if key == "biases" and isinstance(value, (bool, str)):
        return {"all": list(BIASES), True: list(BIASES), "none": [], False: []}.get(value, [value])
    return list(value) if key in PER_LAYER and isinstance(value, tuple) else value


def known(table: Mapping[str, Setting], expected: Setting, what: str, where: str = "") -> None:
    for key in table:
        if key not in expected:
            close = get_close_matches(key, expected, 1)
            hint = f"; did you mean {close[0]}?" if close else f"; expected one of {', '.join(expected)}"
            raise DeadweightError(f"{where}unknown {what} {printable(key)}{hint}")


def made(kind: type[Any], table: Mapping[str, Setting], where: str) -> Any:
    """A dataclass from a table, with types as declared."""
    fields = {f.name: f for f in dataclasses.fields(kind)}
    known(table, tuple(fields), "key", where)
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
        require(0 <= getattr(train, key) < 1, where, key, train, "a number from 0 to 1, below 1")
    require(0 <= train.final_share <= 1, where, "final_share", train, "a number from 0 to 1")
    require(train.seed < 1 << 63, where, "seed", train, "a number below 2⁶³")
    require(0 < train.decay_share <= 1, where, "decay_share", train, "a share above 0, up to 1")
    require(train.schedule in ("cosine", "wsd"), where, "schedule", train, "cosine or wsd")
    require(train.precision in ("auto", "fp32", "bf16"), where, "precision", train, "auto, fp32 or bf16")


def check_data(data: Data, where: str) -> None:
    require(0 < data.valid_share < 1, where, "valid_share", data, "a share between 0 and 1")


def require(holds: bool, where: str, key: str, table: Setting, expected: str) -> None:
    if not holds:
        raise DeadweightError(f"{where}found {key} = {getattr(table, key)!r}; expected {expected}")


def as_toml(run: Run) -> str:
    """The run as a file that `read_run` reads back."""
    lines: list[str] = []
    defaults = Data(), Train()
    tables = {"model": run.model, "data": changed(run.data, defaults[0]), "train": changed(run.train, defaults[1])}
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{k} = {toml_value(v)}" for k, v in table.items() if v is not None), ""]
    return "\n".join(lines)


def changed(settings: Setting, default: Setting) -> Table:
    return {k: v for k, v in dataclasses.asdict(settings).items() if v != getattr(default, k)}


def toml_value(value: Setting) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
    return repr(value)
