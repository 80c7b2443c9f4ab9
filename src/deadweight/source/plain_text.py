"""Text for training, calibration or evaluation: a file, a folder, a dataset, or the one inside the package."""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable
from io import BufferedIOBase
from pathlib import Path

from deadweight import embedded
from deadweight.errors import DeadweightError
from deadweight.progress import Progress, silent
from deadweight.source.printable import printable, reason

OPENERS: dict[str, Callable[..., BufferedIOBase]] = {
    ".gz": gzip.GzipFile,
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
}
TEXTS = (".txt", ".md", ".text")


def boundary(text: bytes, place: int) -> int:
    """The nearest position at or before this one that does not split a character."""
    while place > 0 and place < len(text) and text[place] & 0xC0 == 0x80:
        place -= 1
    return place


def read_text(name: str, progress: Progress = silent) -> bytes:
    """The text that a name means: embedded, a file, a folder, or datasets:NAME."""
    if name == "embedded":
        return embedded.prose().encode()
    if name.startswith("datasets:"):
        return from_datasets(name.removeprefix("datasets:"), progress)
    path = Path(name).expanduser()
    if path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.is_file() and f.suffix in TEXTS)
        if not files:
            raise DeadweightError(f"{printable(name)} holds no text; expected files ending in {', '.join(TEXTS)}")
        return b"\n".join(read_file(f) for f in files)
    if not path.exists():
        raise DeadweightError(
            f"{printable(name)} does not exist; expected a text file, a folder of them, datasets:NAME or embedded"
        )
    return read_file(path)


def read_file(path: Path) -> bytes:
    try:
        with OPENERS.get(path.suffix, open)(path, "rb") as file:
            return bytes(file.read())
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise DeadweightError(f"{printable(path)} cannot be read ({reason(error)})") from error


def from_datasets(name: str, progress: Progress) -> bytes:
    """The text column of a dataset's training split: NAME, NAME:CONFIG or NAME:CONFIG:COLUMN."""
    try:
        import datasets  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise DeadweightError(f"datasets:{printable(name)} needs the datasets package: pip install datasets") from error
    path, config, column = [*name.split(":"), "", ""][:3]
    progress(f"loading {path}")
    try:
        split = datasets.load_dataset(path, config or None, split="train")
    except Exception as error:
        raise DeadweightError(f"datasets:{printable(name)} cannot be loaded ({reason(error)})") from error
    there = list(split.column_names)
    column = column or next((c for c in ("text", "content", *there) if c in there), "text")
    if column not in there:
        raise DeadweightError(
            f"datasets:{printable(name)} has no column {printable(column)}; expected one of {', '.join(there)}"
        )
    return "\n".join(map(str, split[column])).encode()


def check_text(text: bytes, name: str) -> None:
    if not text.strip():
        raise DeadweightError(f"{printable(name)} is empty; expected text")
    head = text[: boundary(text, 1 << 20)] if len(text) > 1 << 20 else text
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DeadweightError(f"{printable(name)} is not UTF-8 text (byte {error.start}); expected text") from error
    if b"\0" in head:
        raise DeadweightError(f"{printable(name)} is binary (it contains zero bytes); expected text")
