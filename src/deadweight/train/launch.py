"""Before the first step: the processes that work together, and the folder that they write to.

torch is imported when processes are started, so that the folder can be checked before that.
"""

from __future__ import annotations

import os
import shutil
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from deadweight.errors import DeadweightError
from deadweight.source.printable import printable, reason
from deadweight.train.result import Trained, read_result
from deadweight.train.settings import Run, as_toml

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped,unused-ignore]

RUN, DATA = "run.toml", "data"  # inside OUT: the settings, and the tokens
MOST_NAMED = 3  # settings that differ


def first_process() -> bool:
    """Whether this process writes and prints for all that were launched together."""
    return int(os.environ.get("RANK", "0")) == 0


def make_accelerator() -> Accelerator:
    """One process, several with copies of the weights (DDP), or several with shards of them (FSDP2), as launched."""
    try:
        from accelerate import Accelerator, DistributedType  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        raise DeadweightError('training needs accelerate: pip install "deadweight[train]"') from error
    import torch

    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not torch.accelerator.is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")  # without it every process runs on its own
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() != "true":
        return Accelerator()
    from accelerate.utils import FullyShardedDataParallelPlugin  # type: ignore[import-untyped,unused-ignore]

    os.environ.setdefault("FSDP_VERSION", "2")
    os.environ.setdefault("FSDP_AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP")
    os.environ.setdefault("FSDP_TRANSFORMER_CLS_TO_WRAP", "Layer")
    plugin = FullyShardedDataParallelPlugin()
    accelerator = Accelerator(fsdp_plugin=plugin)
    if accelerator.distributed_type == DistributedType.MULTI_CPU:  # accelerate shards only on GPUs, torch also on CPUs
        accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    return accelerator


def exit_if_launched() -> None:
    """End this process if it was launched together with others, once all of them are done.

    With FSDP2 on CPUs about one process in ten aborts while Python shuts down (torch 2.13), even after the group was
    destroyed: a thread of gloo is still joinable. So the process ends without that shutdown.
    """
    import torch

    group = torch.distributed
    if not (group.is_available() and group.is_initialized()):
        return
    group.barrier()
    group.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def refuse_out(folder: Path, run: Run, *, overwrite: bool) -> None:
    """Raise, before anything is written, unless OUT is new, holds this run, or holds a run that may be overwritten."""
    if folder.exists() and not folder.is_dir():
        raise DeadweightError(f"{printable(folder)} is a file; expected a folder to write to")
    held = {entry.name for entry in folder.iterdir()} - {DATA} if folder.is_dir() else set()
    if held and RUN not in held:
        raise DeadweightError(
            f"{printable(folder)} is not empty and holds no training run; expected a new folder, or a run to resume"
        )
    stored = (folder / RUN).read_text(encoding="utf-8") if held and not overwrite else as_toml(run)
    if stored != as_toml(run):
        raise DeadweightError(
            f"{printable(folder)} holds a run with other settings ({differences(stored, as_toml(run))}); expected the "
            f"same ones (--config {printable(folder / RUN)}), another folder, or --overwrite"
        )


def differences(stored: str, given: str) -> str:
    """The first settings in which two files of settings differ, with both values."""
    try:
        before, now = flat(tomllib.loads(stored)), flat(tomllib.loads(given))
    except tomllib.TOMLDecodeError:
        return f"its {RUN} is no TOML"
    changed = [key for key in before | now if before.get(key) != now.get(key)]
    words = [
        f"{key}: {before.get(key, 'not set')} there, {now.get(key, 'not set')} here" for key in changed[:MOST_NAMED]
    ]
    more = [f"{len(changed) - MOST_NAMED} more"] if len(changed) > MOST_NAMED else []
    return printable("; ".join(words + more) or f"see {RUN}")


def flat(tables: Mapping[str, object]) -> dict[str, object]:
    """Settings by table.key."""
    result: dict[str, object] = {}
    for name, table in tables.items():
        entries = table if isinstance(table, Mapping) else {"": table}
        result |= {f"{name}.{key}".rstrip("."): value for key, value in entries.items()}
    return result


def finished_run(folder: Path, run: Run, *, overwrite: bool) -> Trained | None:
    """The result, if OUT holds this run and it is finished; an error if OUT cannot be written to."""
    if first_process():
        refuse_out(folder, run, overwrite=overwrite)
    return None if overwrite else read_result(folder)


def begin_out(folder: Path, run: Run, *, overwrite: bool) -> None:
    """Delete what may be overwritten (but not the tokens: their folder is named by a hash), and write the settings."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for entry in folder.iterdir() if overwrite else ():
            if entry.is_dir() and not entry.is_symlink() and entry.name != DATA:
                shutil.rmtree(entry)
            elif entry.name != DATA:
                entry.unlink()
        (folder / RUN).write_text(as_toml(run), encoding="utf-8")
    except OSError as error:
        raise DeadweightError(f"{printable(folder)} cannot be written ({reason(error)})") from error
