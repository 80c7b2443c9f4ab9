"""Writing a compressed model: its weights, the code that builds it, its model card and its deadweight.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from deadweight.save.atomic_folder import check_space, complete_or_absent
from deadweight.save.how_to_load import how_to_load
from deadweight.save.model_card import Card, write_card
from deadweight.save.safetensors_writer import PER_TENSOR, Writer
from deadweight.save.side_files import write_side_files
from deadweight.slim.format import SIGN, SlimSpec
from deadweight.source.checkpoint import ModuleCheckpoint
from deadweight.source.checkpoint_files import read_json
from deadweight.source.type_aliases import Config, JsonObject


@dataclass(frozen=True)
class CompressedModel:
    """A model to write, and what is needed to load it again."""

    module: nn.Module
    cls: type[nn.Module]  # of the original
    slim: SlimSpec | None  # the small layers, heads and caches; None: the same class and shapes
    config: Config
    changes: JsonObject | None  # of config.json
    precision: torch.dtype


def write_compressed(
    model: CompressedModel,
    out: Path,
    *,
    folder: Path | None,
    manifest: JsonObject,
    card: Card,
    overwrite: bool,
) -> None:
    """Write the complete OUT, or nothing; `folder` is that of the original."""
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in named_tensors(model)}
    check_space(out, sum(sizes.values()))
    with complete_or_absent(out, overwrite=overwrite) as draft:
        writer = Writer(draft, sum(len(n) + 2 * PER_TENSOR for n in sizes) + 4096)
        for name, tensor in named_tensors(model):
            writer.add(name, tensor)
        writer.close()
        write_side_files(draft, folder, model.config, model.cls, model.slim)
        if model.changes is not None:
            change_config(draft / "config.json", model.changes)
        loading = how_to_load(out.name, model.cls, model.config, slim=model.slim is not None)
        (draft / "deadweight.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        write_card(draft, card, folder, loading, slim=model.slim is not None)


def change_config(file: Path, changes: JsonObject) -> None:
    """The config with other heads; older settings of the same meaning are removed."""
    raw = {k: v for k, v in read_json(file).items() if k not in ("rope_theta", "rope_scaling")}
    file.write_text(json.dumps(raw | changes, indent=2) + "\n", encoding="utf-8")


def named_tensors(model: CompressedModel) -> Iterator[tuple[str, Tensor]]:
    """Every tensor once, in the precision that the original had, and the guard against plain transformers."""
    checkpoint = ModuleCheckpoint(model.module)
    for name in checkpoint.names:
        tensor = checkpoint.read(name).cpu()
        yield name, tensor.to(model.precision) if tensor.is_floating_point() else tensor
    for path in [] if model.slim is None else model.slim.layers_in_other_form[:1]:
        yield from ((empty, torch.empty(0, dtype=model.precision)) for empty in (f"{path}.weight", SIGN))
