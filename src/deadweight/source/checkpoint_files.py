"""The files of a checkpoint folder, checked without reading weights."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from deadweight.errors import DeadweightError
from deadweight.source.printable import printable, reason
from deadweight.source.type_aliases import JsonObject

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
CONVERT = (
    "loading a pickle can run code, so pickles are never loaded: if you trust the file, convert it once with "
    "model.save_pretrained(folder), which writes safetensors"
)


def read_json(path: Path) -> JsonObject:
    """The object in a JSON file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise DeadweightError(f"{printable(path)} cannot be read ({reason(error)}); expected a JSON file") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise DeadweightError(f"{printable(path)} is not valid JSON ({reason(error)})") from error
    if not isinstance(value, dict):
        raise DeadweightError(f"{printable(path)} holds a {type(value).__name__}; expected a JSON object")
    return value


def refuse_pickle(path: Path) -> None:
    """Raise if this is a pickled checkpoint."""
    if path.suffix.lower() in PICKLES:
        raise DeadweightError(f"{printable(path)} is a pickled checkpoint; {CONVERT}")


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a checkpoint, each inside the folder; empty if there are none.

    A folder may have both a single file and an index of several: transformers reads the single one.
    """
    shards = _shards(folder, read_json(folder / INDEX)) if (folder / INDEX).exists() else ()
    return (_inside(folder, WEIGHTS),) if (folder / WEIGHTS).exists() else shards


def check_weights(folder: Path, *, needed: bool) -> None:
    """Raise if the weights are damaged, or if they are needed and missing or pickled; only headers are read."""
    files = weight_files(folder)
    for file in files:
        check_header(file)
    if files or not needed:
        return
    if pickles := sorted(p.name for p in folder.iterdir() if p.suffix.lower() in PICKLES):
        raise DeadweightError(f"{printable(folder)} holds only pickled weights ({printable(pickles[0])}); {CONVERT}")
    raise DeadweightError(
        f"{printable(folder)} holds no weights; expected {WEIGHTS} or {INDEX}. "
        "A config alone can be audited, but not reduced or evaluated"
    )


def check_header(file: Path) -> None:
    """Raise if a safetensors file is truncated or corrupt."""
    try:
        with safe_open(file, framework="pt") as opened:
            opened.keys()
    except (SafetensorError, OSError) as error:
        raise DeadweightError(
            f"{printable(file)} is damaged or truncated ({reason(error)}); expected a complete safetensors file: "
            "download or save it again"
        ) from error


def _shards(folder: Path, index: JsonObject) -> tuple[Path, ...]:
    names = index.get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise DeadweightError(f"{printable(folder / INDEX)} has no weight_map from parameters to file names")
    files = tuple(_inside(folder, name) for name in sorted(set(names.values())))
    for file in files:
        if not file.is_file():
            raise DeadweightError(
                f"{printable(file)} is missing though {INDEX} names it; expected all {len(files)} shards: "
                "download the rest"
            )
    return files


def _inside(folder: Path, name: str) -> Path:
    """The path of the file; raises unless it is in the folder (or in the hub cache to which the folder links)."""
    plain = not Path(name).is_absolute() and ".." not in Path(name).parts
    if plain and is_inside(folder, folder / name):
        return folder / name
    raise DeadweightError(
        f"{printable(folder)} names the weight file {printable(name)}, which is outside the folder; "
        "expected a plain file name in the config's folder"
    )


def is_inside(folder: Path, file: Path) -> bool:
    """Whether the file, with links followed, is in the folder (or in the hub cache to which the folder links)."""
    return any(_within(file, root) for root in _roots(folder))


def _roots(folder: Path) -> tuple[Path, ...]:
    """The folder; and, for a snapshot of the hub cache, the folder of blobs to which its links point."""
    real = folder.resolve()
    return (real, real.parent.parent / "blobs") if real.parent.name == "snapshots" else (real,)


def _within(file: Path, root: Path) -> bool:
    return file.resolve().is_relative_to(root)
