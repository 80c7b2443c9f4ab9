"""Opening a model, whatever form it comes in."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn
from torch.utils import _pytree as pytree

from deadweight import embedded
from deadweight.errors import DeadweightError
from deadweight.source import factory, hugging
from deadweight.source.blocks import Blocks, Record, collapse
from deadweight.source.copies import copy_tensors, share_tensors
from deadweight.source.examples import example_inputs, left_out, run
from deadweight.source.files import refuse_pickle
from deadweight.source.inputs import Inputs, as_inputs
from deadweight.source.kinds import Arguments, Config, ExampleInputs, Keywords, Leaf, ModelLike, Options, Setting
from deadweight.source.text import printable, reason
from deadweight.source.trial import Untouched, WrittenTo, held_tensors, kept_note, run_or_refuse

REFUSED = "no example input that was tried runs: "


@dataclass(frozen=True)
class Source:
    """A model ready to be traced, with inputs to trace it on."""

    name: str  # what the user gave
    module: nn.Module  # eval mode unless training was asked for, eager attention, no cache
    kwargs: Keywords  # example inputs by keyword, on the module's device
    args: Arguments  # positional example inputs, on the module's device
    has_weights: bool  # False: the module is on the meta device
    config: Config | None  # the PretrainedConfig of a Hugging Face model
    notes: tuple[str, ...] = ()
    inputs: Inputs = field(default_factory=Inputs)  # the same example on the CPU, with what may be drawn in its place
    blocks: tuple[Blocks, ...] = ()  # lists of repeated blocks that were cut short
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # every parameter of the whole model
    missing: tuple[str, ...] = ()  # parameters that the checkpoint does not hold, and that are random

    def draw(self, generator: torch.Generator) -> tuple[Arguments, Keywords]:
        """Fresh random inputs of the example's shapes and types, on the CPU."""
        return self.inputs.draw(generator)


def open_model(
    spec: str | Path | nn.Module,
    *,
    weights: bool = False,
    inputs: ExampleInputs = None,
    training: bool = False,
    trust_remote_code: bool = False,
    length: int | None = None,
    collapsed: bool = False,
) -> Source:
    """The model that `spec` names, and example inputs for it.

    `spec` is a Hugging Face folder or hub id, a config.json, a .gguf file, package.module:callable, or a module.
    Without `weights` no weight is read where a config says the shapes: the module is then on the meta device. A
    `collapsed` model keeps only as many repeated blocks as show every kind.
    """
    made = _built(spec, weights=weights, trust_remote_code=trust_remote_code)
    given = inputs if inputs is not None else made.inputs
    options: Options = {"training": training, "length": length, "collapsed": collapsed}
    own = [] if not isinstance(spec, nn.Module) else [*spec.parameters(), *spec.buffers()]
    try:
        with Untouched(own) if own else nullcontext():
            return _opened(made, given, **options)
    except WrittenTo:  # running it changes parameters or buffers: those of a copy
        return _opened(replace(made, module=copy_tensors(made.module)), given, **options)


def _opened(
    made: hugging.Built, given: ExampleInputs, *, training: bool, length: int | None, collapsed: bool
) -> Source:
    shapes = {name: tuple(p.shape) for name, p in made.module.named_parameters()}
    if not collapsed:
        return replace(as_source(made, given, training=training, length=length), shapes=shapes)
    if given is not None:
        return replace(tried(as_source(made, given, training=training)), shapes=shapes)
    record = Record(made.module)
    with record.skimming():
        source = as_source(made, given, training=training, length=length)
        try:
            record.watch(lambda watch: run(source.module, source.inputs, watch))
        except Exception:  # noqa: BLE001 - a model that does not run is traced whole, and says there why
            record.reset()
    return replace(source, blocks=collapse(source.module, record), shapes=shapes)


def tried(source: Source) -> Source:
    """The source with repeated blocks cut, after one run of a copy on its user's inputs; refuses those that fail.

    A copy, because a forward may keep something for the next call.
    """
    trial = share_tensors(source.module)
    record, held = Record(trial), held_tensors(trial)
    try:
        with record.skimming():
            record.watch(lambda watch: called(trial, source, watch))
    except Exception:  # noqa: BLE001 - said below, by the model itself
        record.reset()
        if source.has_weights:
            run_or_refuse(source.name, lambda: called(share_tensors(source.module), source))
    notes = kept_note(held, held_tensors(trial))
    return replace(source, blocks=collapse(source.module, record), notes=source.notes + notes)


@torch.no_grad()
def called(module: nn.Module, source: Source, watch: AbstractContextManager[object] | None = None) -> Leaf:
    """The model's output for exactly these inputs; without weights, its shapes."""
    if not source.has_weights:
        return run(module, source.inputs, watch)
    args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, (source.args, source.kwargs))
    with watch or nullcontext():
        return module(*args, **kwargs)


def open_complete(spec: ModelLike, **options: Setting) -> Source:
    """The model with its weights, refused if some of them are missing and would be random."""
    source = open_model(spec, weights=True, **options)
    if source.missing:
        raise DeadweightError(
            f"{printable(source.name)}: {len(source.missing)} parameters are not in the checkpoint and are random, "
            f"first {printable(source.missing[0])}; expected a complete checkpoint"
        )
    return source


def whole_module(spec: ModelLike, *, trust_remote_code: bool = False) -> nn.Module:
    """The module that `spec` names with all its blocks, on shapes alone where a config says them; it is not run."""
    return _built(spec, weights=False, trust_remote_code=trust_remote_code).module.eval()


def _built(spec: str | Path | nn.Module, *, weights: bool, trust_remote_code: bool) -> hugging.Built:
    if isinstance(spec, nn.Module):
        return factory.from_module(spec)
    if not isinstance(spec, (str, Path)) or not str(spec):
        raise DeadweightError(f"found {printable(repr(spec))} as the model; expected a path, a hub id or an nn.Module")
    refuse_unthinkable(spec)
    if str(spec) == "demo" and not Path(spec).exists():
        return replace(hugging.from_spec(str(embedded.path()), weights=weights, trust_remote_code=False), name="demo")
    if factory.looks_like(str(spec)) and not Path(spec).exists():
        return factory.from_spec(str(spec))
    refuse_pickle(Path(spec))
    return hugging.from_spec(str(spec), weights=weights, trust_remote_code=trust_remote_code)


def refuse_unthinkable(spec: str | Path) -> None:
    """Raise if the file system cannot even be asked about this name."""
    try:
        Path(spec).expanduser().exists()
    except (OSError, RuntimeError) as error:
        raise DeadweightError(
            f"{printable(spec)} cannot be looked up ({reason(error)}); "
            "expected a path, a hub id or package.module:callable"
        ) from error


def as_source(
    made: hugging.Built, given: ExampleInputs, *, training: bool = False, length: int | None = None
) -> Source:
    """The source of a module that was built, with the user's inputs or with examples."""
    module, config = made.module.train(training), made.config
    notes = made.notes
    if given is not None:
        inputs = as_inputs(given)
    elif config is None:
        raise DeadweightError(
            f"{printable(made.name)} gives a {type(module).__name__} without example inputs; expected them beside it: "
            "return (module, inputs) from the callable, or pass inputs="
        )
    else:
        inputs, refusal = example_inputs(module, config, length)
        absent = left_out(module, inputs)
        notes += (f"{REFUSED}{refusal}",) if refusal else ()
        notes += (f"without {', '.join(absent)}: what only serves them is not examined",) if absent else ()
    parameters = list(module.parameters())
    has_weights = not any(p.is_meta for p in parameters)
    device = parameters[0].device if parameters else torch.device("cpu")
    floats = [p.dtype for p in parameters if p.is_floating_point()]
    args, kwargs = inputs.on(
        device, floats[0] if floats and config is not None else None
    )  # images for a bfloat16 model
    return Source(made.name, module, kwargs, args, has_weights, config, notes, inputs, missing=made.missing)
