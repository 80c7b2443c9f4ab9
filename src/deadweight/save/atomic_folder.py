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
from deadweight.source.model import refuse_impossible_path
from deadweight.source.printable import printable, reason
from deadweight.source.type_aliases import ModelLike

CHECKPOINT = ("config.json", "deadweight.json", "*.safetensors")  # a folder with any of these is a checkpoint
MARGIN = 64 << 20  # bytes left free on the disk


def resolve_path(out: str | Path) -> Path:
    """OUT as a path, with links and .. resolved."""
    try:
        path = Path(out).expanduser()
        path.exists()
        return path.resolve() if path.is_symlink() or ".." in path.parts else path
    except (OSError, RuntimeError, ValueError) as error:
        raise DeadweightError(f"{printable(out)} cannot be a folder ({reason(error)}); choose another name") from error


def check_target(out: Path, *, overwrite: bool) -> None:
    """Raise if OUT exists already, or if its parent folder does not exist or is not writable."""
    if (out.exists() or out.is_symlink()) and not overwrite:
        raise DeadweightError(
            f"{printable(out)} exists; expected a new folder: choose another one, or pass --overwrite (overwrite=True)"
        )
    if out.exists() and not out.is_dir():
        raise DeadweightError(f"{printable(out)} is a file; expected a folder, or a path that does not exist")
    parent = out.absolute().parent
    if not parent.is_dir():
        raise DeadweightError(f"{printable(parent)} does not exist; expected an existing folder in which to create OUT")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise DeadweightError(f"{printable(parent)} cannot be written to; expected a folder with write permission")


def check_replaceable(out: Path) -> None:
    """Raise if OUT holds files but no checkpoint: --overwrite replaces the whole folder."""
    here = Path.cwd()
    if out.resolve() in (here, *here.parents):
        raise DeadweightError(
            f"{printable(out)} is the working directory or contains it; expected a folder that can be replaced"
        )
    if out.is_dir() and any(out.iterdir()) and not any(f for pattern in CHECKPOINT for f in out.glob(pattern)):
        raise DeadweightError(
            f"{printable(out)} holds files but no checkpoint; expected a checkpoint for --overwrite to replace: choose "
            "another folder, or empty this one"
        )


def check_space(out: Path, needed: int) -> None:
    free = shutil.disk_usage(out.absolute().parent).free
    if free < needed + MARGIN:
        raise DeadweightError(
            f"the disk of {printable(out)} has {free / 1e9:.2f} GB free; {(needed + MARGIN) / 1e9:.2f} GB are needed: "
            "free some space, or choose another disk"
        )


@contextmanager
def complete_or_absent(out: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A temporary folder next to OUT: it is renamed to OUT if the block ends without an error, and else removed.

    A process that is killed leaves a folder named .OUT.part-…, never an incomplete OUT.
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
    """Flush all files to disk, before the folder gets its name."""
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def check_out(out: Path, model: ModelLike, *, overwrite: bool) -> None:
    """Raise before any work is done if OUT cannot be written."""
    check_target(out, overwrite=overwrite)
    if not isinstance(model, nn.Module):
        refuse_impossible_path(str(model))
    if not isinstance(model, nn.Module) and str(model) and Path(str(model)).expanduser().exists():
        here, there = Path(str(model)).expanduser().resolve(), out.resolve()
        if here == there or here in there.parents:
            raise DeadweightError(f"{printable(out)} is the model's own folder, or inside it; expected another folder")
        if there in here.parents:
            raise DeadweightError(f"{printable(out)} contains the model and would be replaced; expected another folder")
    if overwrite:
        check_replaceable(out)
