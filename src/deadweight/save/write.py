"""Writing a reduced checkpoint: stock or slim, one module at a time, complete or absent."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from deadweight.errors import DeadweightError
from deadweight.reduce.apply import Applied, Weights, apply, checked, rounded
from deadweight.reduce.job import Job, settled
from deadweight.reduce.result import Reduction
from deadweight.reduce.rewrite import Rewrite, module_of
from deadweight.save.folder import check_replaceable, check_target, complete_or_absent
from deadweight.save.manifest import card, manifest
from deadweight.save.slim import layout as slim_layout
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
    rewrites: Sequence[Rewrite],
    applied: Applied,
    found: Reduction,
    out: Path,
    *,
    overwrite: bool,
    say: Callable[[str], None],
) -> Reduction:
    """Apply the rewrites once more, streaming, and write what comes of them."""
    with complete_or_absent(out, overwrite=overwrite) as draft:
        room = sum(len(n) + 2 * PER_TENSOR for n in job.checkpoint.names) * 2 + 4096
        writer = Writer(draft, room)
        numbers = Numbers(job)
        specs: dict[str, dict[str, Any]] = {}
        for name, tensor in stream(job, rewrites, applied, specs, say):
            writer.add(job.checkpoint.outer(name), tensor)
            numbers.count(name, tensor)
        for name, tensor in guard(job, specs):
            writer.add(job.checkpoint.outer(name), tensor)
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


def stream(
    job: Job, rewrites: Sequence[Rewrite], applied: Applied, specs: dict[str, Any], say: Callable[[str], None]
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the new checkpoint, by its name in the model."""
    due = Due(rewrites)
    ready: dict[str, Tensor] = {}
    written: set[str] = set()
    count = 0

    def started(_: Rewrite) -> None:
        nonlocal count
        count += 1
        say(f"writing: {count} of {len(rewrites)} rewrites")

    for name, value in apply(rewrites, Weights(job.read, scaled=rounded(job.precision)), applied, started=started):
        if value is not None:
            ready[name] = value
        for unit in due.released(name):
            for item in finished(job, unit, ready, applied, specs):
                written.add(item[0])
                yield item
    covered = {n for unit in due.units for n in names_in(job, unit)}
    for name in job.checkpoint.names:
        if name not in written and name not in covered:
            yield name, checked(name, job.checkpoint.read(name))


class Due:
    """Which modules are complete: all their weights that any rewrite touches are final."""

    def __init__(self, rewrites: Iterable[Rewrite]) -> None:
        self.unit_of: dict[str, int] = {}
        groups: list[set[str]] = []
        waiting: list[set[str]] = []
        for rewrite in rewrites:
            for name in rewrite.touches:
                path = module_of(name)
                if path not in self.unit_of:
                    self.unit_of[path] = len(groups)
                    groups.append({path})
                    waiting.append(set())
                waiting[self.unit_of[path]].add(name)
            if rewrite.claim.code == "DW004":  # a norm's shift becomes the bias of the layer before it
                first, *others = dict.fromkeys(self.unit_of[module_of(n)] for n in rewrite.touches)
                for other in others:
                    for path in groups[other]:
                        self.unit_of[path] = first
                    groups[first] |= groups[other]
                    waiting[first] |= waiting[other]
                    groups[other], waiting[other] = set(), set()
        self.groups, self.waiting = groups, waiting

    @property
    def units(self) -> list[set[str]]:
        return [g for g in self.groups if g]

    def released(self, name: str) -> Iterator[set[str]]:
        number = self.unit_of[module_of(name)]
        self.waiting[number].discard(name)
        if not self.waiting[number]:
            yield self.groups[number]


def names_in(job: Job, modules: set[str]) -> list[str]:
    """The stored names that belong to these modules themselves."""
    return [n for n in job.checkpoint.names if module_of(n) in modules]


def finished(
    job: Job, modules: set[str], ready: dict[str, Tensor], applied: Applied, specs: dict[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of complete modules, in their own precision."""

    def whole(name: str) -> Tensor:
        if name in ready:
            return ready[name].to(job.precision(name))
        return checked(name, job.read(name))

    replaced: set[str] = set()
    if job.layout == "slim":
        facts = [f for f in applied.facts if path_of(f) in modules]
        form = slim_layout(job.whole, facts)
        specs.update(form.modules)
        for path in form.modules:
            yield from form.tensors(path, whole).items()
        replaced = set(form.replaces)
    for name in names_in(job, modules):
        if name not in replaced:
            yield name, whole(name)
    for name in [n for n in ready if module_of(n) in modules]:
        del ready[name]


def guard(job: Job, specs: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """An empty tensor under the name of one weight that is stored in another form.

    Plain transformers makes up the weights that it does not find, and says so in a warning only; this one it finds, and
    refuses for its shape.
    """
    if job.source.config is not None:
        for path in [path for path, spec in specs.items() if spec["kind"] in REPLACED][:1]:
            name = f"{path}.weight"
            yield name, torch.empty(0, dtype=job.checkpoint.dtype(job.stored_name(name)))


def path_of(fact: Any) -> str:
    return str(getattr(fact, "module", "") or module_of(fact.parameter))


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
