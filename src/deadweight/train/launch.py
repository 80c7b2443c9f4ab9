"""Before the first step: the processes that work together, and the folder that they write to."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from deadweight.errors import DeadweightError
from deadweight.source.text import printable, reason
from deadweight.train.settings import Run, as_toml


def make_accelerator() -> Any:
    """As launched: one process, several with copies of the weights (DDP), or several with shards of them (FSDP2)."""
    try:
        from accelerate import Accelerator, DistributedType  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        raise DeadweightError("training needs accelerate: pip install deadweight[train]") from error
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() != "true":
        return Accelerator()
    from accelerate.utils import FullyShardedDataParallelPlugin  # type: ignore[import-untyped,unused-ignore]

    os.environ.setdefault("FSDP_VERSION", "2")
    os.environ.setdefault("FSDP_AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP")
    os.environ.setdefault("FSDP_TRANSFORMER_CLS_TO_WRAP", "Layer")
    plugin = FullyShardedDataParallelPlugin()
    accelerator = Accelerator(fsdp_plugin=plugin)
    if accelerator.distributed_type == DistributedType.MULTI_CPU:  # accelerate shards on GPUs alone; torch here too
        accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    return accelerator


def open_out(folder: Path, run: Run, *, overwrite: bool) -> None:
    """A new folder, or one with the same run in it."""
    told = as_toml(run)
    if folder.exists() and overwrite:
        if not (folder / "run.toml").is_file() and any(folder.iterdir()):
            raise DeadweightError(f"{printable(folder)} holds something that is no training run; choose another folder")
        shutil.rmtree(folder)
    if folder.is_dir() and any(folder.iterdir()):
        before = (folder / "run.toml").read_text(encoding="utf-8") if (folder / "run.toml").is_file() else None
        if before is None:
            raise DeadweightError(f"{printable(folder)} is not empty; expected a new folder, or a run to go on with")
        if before != told:
            raise DeadweightError(
                f"{printable(folder)} holds another run (run.toml differs); expected the same settings to go on with: "
                "choose another folder, or --overwrite"
            )
    elif folder.exists() and not folder.is_dir():
        raise DeadweightError(f"{printable(folder)} is a file; expected a folder to write to")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.toml").write_text(told, encoding="utf-8")
    except OSError as error:
        raise DeadweightError(f"{printable(folder)} cannot be written ({reason(error)})") from error
