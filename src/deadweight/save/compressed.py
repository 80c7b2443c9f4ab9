"""Writing a compressed model: its weights, the code that builds it, what was done and what it costs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from deadweight.save.beside import how_to_load, lay_beside
from deadweight.save.folder import check_space, complete_or_absent
from deadweight.save.stream import PER_TENSOR, Writer
from deadweight.slim.format import SIGN, SlimSpec
from deadweight.source.checkpoint import ModuleCheckpoint
from deadweight.source.files import read_json
from deadweight.source.kinds import Config, JsonObject


def write_compressed(
    module: nn.Module,
    slim: SlimSpec | None,
    manifest: JsonObject,
    card: Callable[[str], str],
    out: Path,
    *,
    folder: Path | None,
    config: Config,
    changes: JsonObject | None,
    cls: type[nn.Module],
    precision: torch.dtype,
    overwrite: bool,
) -> None:
    """OUT with everything, or nothing. `slim` is the spec of the small layers; None: the same class and shapes.

    `card` makes the README, given how the model is loaded.
    """
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in named_tensors(module, slim, precision)}
    check_space(out, sum(sizes.values()))
    with complete_or_absent(out, overwrite=overwrite) as draft:
        writer = Writer(draft, sum(len(n) + 2 * PER_TENSOR for n in sizes) + 4096)
        for name, tensor in named_tensors(module, slim, precision):
            writer.add(name, tensor)
        writer.close()
        lay_beside(draft, folder, config, cls, slim)
        if changes is not None:
            change_config(draft / "config.json", changes)
        loading = how_to_load(out.name, cls, config, slim=slim is not None)
        (draft / "deadweight.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        (draft / "README.md").write_text(card(loading), encoding="utf-8")


def change_config(file: Path, changes: JsonObject) -> None:
    """The config with other heads; what says the same in older words goes."""
    raw = {k: v for k, v in read_json(file).items() if k not in ("rope_theta", "rope_scaling")}
    file.write_text(json.dumps(raw | changes, indent=2) + "\n", encoding="utf-8")


def named_tensors(module: nn.Module, slim: SlimSpec | None, precision: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every tensor once, in the precision that the original had, and the guard against plain transformers."""
    checkpoint = ModuleCheckpoint(module)
    for name in checkpoint.names:
        tensor = checkpoint.read(name).cpu()
        yield name, tensor.to(precision) if tensor.is_floating_point() else tensor
    for path in [] if slim is None else slim.stored_otherwise[:1]:
        yield from ((empty, torch.empty(0, dtype=precision)) for empty in (f"{path}.weight", SIGN))
