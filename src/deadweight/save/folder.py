"""A folder that appears complete or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from deadweight.errors import DeadweightError
from deadweight.source.kinds import ModelLike
from deadweight.source.model import refuse_unthinkable
from deadweight.source.text import printable, reason

CHECKPOINT = ("config.json", "deadweight.json", "*.safetensors")  # by any of these a folder is one
MARGIN = 64 << 20  # bytes left free on the disk


def followed(out: str | Path) -> Path:
    """OUT as a path; where it is a link, or goes up, the place that is meant."""
    try:
        path = Path(out).expanduser()
        path.exists()
        return path.resolve() if path.is_symlink() or ".." in path.parts else path
    except (OSError, RuntimeError, ValueError) as error:
        raise DeadweightError(f"{printable(out)} cannot be a folder ({reason(error)}); choose another name") from error


def check_target(out: Path, *, overwrite: bool) -> None:
    """Raise if OUT is taken, or has nowhere to be."""
    if (out.exists() or out.is_symlink()) and not overwrite:
        raise DeadweightError(f"{printable(out)} exists; expected a new folder: choose another, or pass --overwrite")
    if out.exists() and not out.is_dir():
        raise DeadweightError(f"{printable(out)} is a file; expected a folder, or nothing, there")
    parent = out.absolute().parent
    if not parent.is_dir():
        raise DeadweightError(f"{printable(parent)} does not exist; expected the folder in which OUT will be")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise DeadweightError(f"{printable(parent)} cannot be written to; expected a folder of your own")


def check_replaceable(out: Path) -> None:
    """Raise if what OUT holds is no checkpoint: --overwrite replaces all of it."""
    here = Path.cwd()
    if out.resolve() in (here, *here.parents):
        raise DeadweightError(f"{printable(out)} is the folder you are in, or above it; expected one to be replaced")
    if out.is_dir() and any(out.iterdir()) and not any(f for pattern in CHECKPOINT for f in out.glob(pattern)):
        raise DeadweightError(
            f"{printable(out)} holds files, and no checkpoint that --overwrite could replace; choose another folder, "
            "or empty it yourself"
        )


def check_space(out: Path, needed: int) -> None:
    free = shutil.disk_usage(out.absolute().parent).free
    if free < needed + MARGIN:
        raise DeadweightError(
            f"the disk of {printable(out)} has {free / 1e9:.2f} GB free; {(needed + MARGIN) / 1e9:.2f} GB are needed: "
            "make room, or choose another disk"
        )


@contextmanager
def complete_or_absent(out: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A folder beside OUT to write in; it becomes OUT when the block ends without an error, and else is removed.

    A process that is killed leaves a folder named .OUT.part-…, never an OUT that is not complete.
    """
    out = out.absolute()
    check_target(out, overwrite=overwrite)
    try:
        draft = Path(tempfile.mkdtemp(prefix=f".{out.name}.part-", dir=out.parent))
    except OSError as error:
        raise DeadweightError(f"{printable(out.parent)} cannot be written to ({reason(error)})") from error
    draft.chmod(0o755)
    try:
        yield draft
        sync(draft)
        put_in_place(draft, out)
    except OSError as error:
        raise DeadweightError(
            f"{printable(out)} could not be written ({reason(error)}); nothing was left behind"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def put_in_place(draft: Path, out: Path) -> None:
    if not out.exists():
        draft.rename(out)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{out.name}.old-", dir=out.parent))
    out.rename(old / out.name)
    try:
        draft.rename(out)
    except OSError:
        (old / out.name).rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)


def sync(folder: Path) -> None:
    """Everything on disk before the name appears."""
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def check_out(out: Path, model: ModelLike, *, overwrite: bool) -> None:
    """Raise before any work is done if OUT cannot be."""
    check_target(out, overwrite=overwrite)
    if not isinstance(model, nn.Module):
        refuse_unthinkable(str(model))
    if not isinstance(model, nn.Module) and str(model) and Path(str(model)).expanduser().exists():
        here, there = Path(str(model)).expanduser().resolve(), out.resolve()
        if here == there or here in there.parents:
            raise DeadweightError(f"{printable(out)} is the model itself, or inside it; expected another folder")
        if there in here.parents:
            raise DeadweightError(f"{printable(out)} holds the model, and would be replaced; expected another folder")
    if overwrite:
        check_replaceable(out)
