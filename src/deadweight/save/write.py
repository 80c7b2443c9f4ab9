"""Writing a reduced checkpoint: stock or slim, one module at a time, complete or absent."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from deadweight.errors import DeadweightError
from deadweight.reduce.apply import Applied, Group
from deadweight.reduce.job import Job, settled
from deadweight.reduce.result import Reduction
from deadweight.reduce.verify import accepted
from deadweight.reduce.windows import Windows
from deadweight.save.folder import check_replaceable, check_target, complete_or_absent
from deadweight.save.manifest import card, manifest
from deadweight.save.parts import Made, stream
from deadweight.save.slim import public
from deadweight.save.stream import PER_TENSOR, Writer
from deadweight.source.files import PICKLES, read_json
from deadweight.source.model import refuse_unthinkable
from deadweight.source.slim_modeling import REPLACED
from deadweight.source.text import printable
from deadweight.transformer.configuration import TransformerConfig
from deadweight.transformer.modeling import TransformerPreTrained

PACKAGE = Path(__file__).parent.parent
OWN_CODE = (PACKAGE / "transformer" / "configuration.py", PACKAGE / "transformer" / "modeling.py")
MODELING = "modeling_deadweight.py"
ATTENTION = "attention_deadweight.py"
DECODE = "slim_decode.py"  # imported by the one above, under this name
FREIGHT = 64 << 20  # bytes: larger files beside the weights are not taken along
LEFT_BEHIND = {".safetensors", ".gguf", ".h5", ".msgpack", ".onnx", ".lock", *PICKLES}
AUTOS = (
    "AutoModelForCausalLM",
    "AutoModelForMaskedLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "AutoModelForQuestionAnswering",
    "AutoModelForImageClassification",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForImageTextToText",
    "AutoModelForPreTraining",
    "AutoModel",
)


def check_out(out: Path, model: Any, *, overwrite: bool) -> None:
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


def write(
    job: Job,
    rewrites: Group,
    found: Reduction,
    out: Path,
    made: Made | None,
    windows: Windows | None,
    *,
    overwrite: bool,
    say: Callable[[str], None],
) -> Reduction:
    """Write what the rewrites make of the checkpoint, and have the windows see it pass; OUT appears if they agree."""
    applied, specs, numbers = Applied(), dict[str, Any](), Numbers(job)
    room = sum(len(n) + 2 * PER_TENSOR for n in job.checkpoint.names) * 2 + 4096
    with complete_or_absent(out, overwrite=overwrite) as draft, Writer(draft, room) as writer:
        with closing(stream(job, rewrites, applied, specs, say, made, windows)) as tensors:
            for name, tensor in tensors:
                numbers.count(name, tensor)
                writer.add(job.checkpoint.outer(name), tensor)
        for name, tensor in guard(job, specs):
            writer.add(job.checkpoint.outer(name), tensor)
        if windows is not None:
            found = replace(found, verification=accepted(windows.verification()))
        writer.close()
        done = settled(job, found, applied)
        done = replace(done, parameters_after=numbers.total, bytes_after=writer.bytes)
        accompany(job, draft, specs)
        loading = loading_words(job, out)
        (draft / "deadweight.json").write_text(json.dumps(manifest(done), indent=1) + "\n", encoding="utf-8")
        (draft / "README.md").write_text(card(done, loading), encoding="utf-8")
    return done


class Numbers:
    """How many parameters the file holds: floating-point numbers that are not buffers of the original."""

    def __init__(self, job: Job) -> None:
        self.buffers = {n for n in job.checkpoint.names if n not in job.source.shapes}
        self.buffers -= {n for first, others in job.graph.tied.items() for n in (first, *others)}
        self.total = 0

    def count(self, name: str, tensor: Tensor) -> None:
        if tensor.is_floating_point() and name not in self.buffers:
            self.total += tensor.numel()


def guard(job: Job, specs: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """An empty tensor under the name of one weight that is stored in another form.

    Plain transformers makes up the weights that it does not find, and says so in a warning only; this one it finds, and
    refuses for its shape.
    """
    if job.source.config is not None:
        for path in [path for path, spec in specs.items() if spec["kind"] in REPLACED][:1]:
            name = f"{path}.weight"
            yield name, torch.empty(0, dtype=job.checkpoint.dtype(job.stored_name(name)))


def accompany(job: Job, draft: Path, specs: dict[str, Any]) -> None:
    """What lies beside the weights, for a reduction."""
    slim = {"format": 1, "modules": public(specs)} if job.layout == "slim" else None
    lay_beside(draft, job.folder, job.source.config, type(job.whole), slim)


def lay_beside(
    draft: Path, folder: Path | None, config: Any, cls: type[nn.Module], slim: dict[str, Any] | None
) -> None:
    """Config, tokenizer and whatever else lies in the folder; for slim, the code that builds its layers."""
    if folder is not None:
        for file in sorted(folder.rglob("*")):
            inside = file.relative_to(folder)
            plain = file.is_file() and not any(part.startswith(".") for part in inside.parts)
            if plain and takes_along(file):
                (draft / inside).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, draft / inside)
    elif config is not None:
        config.save_pretrained(draft)
    if slim is not None and config is None:
        (draft / "slim.json").write_text(json.dumps(slim) + "\n", encoding="utf-8")
    elif slim is not None:
        write_slim_code(draft, config, cls, slim)


def write_slim_code(draft: Path, config: Any, cls: type[nn.Module], slim: dict[str, Any]) -> None:
    """The config of a slim checkpoint, and the files that build it where deadweight is not installed."""
    file = draft / "config.json"
    raw = read_json(file)
    raw["deadweight"] = slim
    raw["auto_map"] = dict.fromkeys(autos_of(cls, config), f"{MODELING.removesuffix('.py')}.SlimModel")
    if isinstance(config, TransformerConfig):
        raw["auto_map"]["AutoConfig"] = f"configuration.{TransformerConfig.__name__}"
        for own in OWN_CODE:
            shutil.copyfile(own, draft / own.name)
    raw.setdefault("architectures", [cls.__name__])
    file.write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    if "attention" in slim:
        shutil.copyfile(PACKAGE / "source" / "slim_attention.py", draft / ATTENTION)
        shutil.copyfile(PACKAGE / "source" / DECODE, draft / DECODE)
    (draft / MODELING).write_text(modeling(cls, attention="attention" in slim), encoding="utf-8")


def takes_along(file: Path) -> bool:
    named = file.suffix.lower() in LEFT_BEHIND or file.name.endswith(".index.json")
    return not named and file.name not in ("README.md", "deadweight.json") and file.stat().st_size <= FREIGHT


def autos_of(cls: type[nn.Module], config: Any) -> list[str]:
    """The Auto classes of transformers that stand for this model class."""
    found = []
    for name in AUTOS:
        mapping = getattr(transformers, name, None)
        known = mapping._model_mapping.get(type(config), None) if mapping is not None else None
        classes = known if isinstance(known, (tuple, list)) else (known,)
        if cls in classes:
            found.append(name)
    return found or ["AutoModel"]


def modeling(cls: type[nn.Module], *, attention: bool = False) -> str:
    """The code that travels with a slim checkpoint: its layers, and the model class that uses them."""
    source = PACKAGE / "source" / "slim_modeling.py"
    home = ".modeling" if issubclass(cls, TransformerPreTrained) else "transformers"
    packed = f"from .{ATTENTION.removesuffix('.py')} import install_attention  # noqa: E402\n" if attention else ""
    last = '        install_attention(self, config.deadweight["attention"])\n' if attention else ""
    return source.read_text(encoding="utf-8") + (
        f"\n\nfrom {home} import {cls.__name__}  # noqa: E402\n{packed}\n\n"
        f"class SlimModel({cls.__name__}):\n"
        f'    """{cls.__name__} with the layers that its config describes."""\n\n'
        "    def __init__(self, config, *args, **kwargs):\n"
        "        super().__init__(config, *args, **kwargs)\n"
        f"        install(self, config.deadweight)\n{last}"
    )


def loading_words(job: Job, out: Path) -> str:
    return how_to_load(out.name, type(job.whole), job.source.config, slim=job.layout == "slim")


def how_to_load(name: str, cls: type[nn.Module], config: Any, *, slim: bool) -> str:
    if config is None:
        return f'import deadweight\nmodel = deadweight.load("{name}", build())  # build() makes the original module'
    auto = autos_of(cls, config)[0]
    trust = ", trust_remote_code=True" if slim else ""
    lines = [f"from transformers import {auto}", f'model = {auto}.from_pretrained("{name}"{trust})']
    if slim:
        lines += [
            "# or, without running code from the folder:",
            "import deadweight",
            f'model = deadweight.load("{name}")',
        ]
    return "\n".join(lines)
