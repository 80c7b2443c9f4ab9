"""Opening a model in any of its forms."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn
from torch.utils import _pytree as pytree

from deadweight import embedded
from deadweight.errors import DeadweightError
from deadweight.source import factory, hugging_face
from deadweight.source.blocks import Blocks, Record, collapse
from deadweight.source.checkpoint_files import refuse_pickle
from deadweight.source.examples import depends_on_data, example_inputs, left_out, refuse_too_long, run
from deadweight.source.guessed_inputs import describe_forward, guess_inputs
from deadweight.source.inputs import Inputs, as_inputs
from deadweight.source.module_copies import copy_tensors, share_tensors
from deadweight.source.printable import printable, reason
from deadweight.source.trial_run import Untouched, WrittenTo, held_tensors, kept_note, run_or_refuse
from deadweight.source.type_aliases import Arguments, Config, ExampleInputs, Keywords, Leaf, ModelLike
from deadweight.source.written_inputs import read_inputs


@dataclass(frozen=True)
class Source:
    """A model ready to be traced, with inputs to trace it on."""

    name: str  # what the user gave
    module: nn.Module  # eval mode unless training was asked for, eager attention, no cache
    kwargs: Keywords  # example inputs by keyword, on the module's device
    args: Arguments  # positional example inputs, on the module's device
    has_weights: bool  # False: the module is on the meta device
    config: Config | None  # of a Hugging Face model
    notes: tuple[str, ...] = ()
    inputs: Inputs = field(default_factory=Inputs)  # the same example on the CPU, with what may be drawn in its place
    blocks: tuple[Blocks, ...] = ()  # lists of repeated blocks that were cut short
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # every parameter of the whole model
    missing: tuple[str, ...] = ()  # parameters that the checkpoint lacks, and that are random
    refusal: str | None = None  # why the model does not run on the example inputs, where none was found that it runs on
    quantised: bool = False  # the checkpoint is
    stored_dtype: torch.dtype | None = None  # of the checkpoint, if it may differ from the module's
    trusted: bool = False  # the user allowed the code in the model's folder to run

    def draw(self, generator: torch.Generator) -> tuple[Arguments, Keywords]:
        """Fresh random inputs of the example's shapes and types, on the CPU."""
        return self.inputs.draw(generator)


@dataclass(frozen=True)
class ModelSpec:
    """A model as a user gives it, and how to open it.

    The model is a Hugging Face folder or hub id, a config.json, a .gguf file, package.module:callable, or a module.
    """

    model: ModelLike | factory.MadeModule
    inputs: ExampleInputs = None  # None: those that come with the model, or examples made from its config
    trust_remote_code: bool = False
    training: bool = False
    length: int | None = None  # of example sequences

    def open(self, *, weights: bool = False, collapsed: bool = False) -> Source:
        """The model and example inputs for it.

        Without `weights` no weight is read where a config says the shapes: the module is then on the meta device. A
        `collapsed` model keeps only as many repeated blocks as show every kind.
        """
        model, built = self.model, _build(self.model, weights=weights, trust_remote_code=self.trust_remote_code)
        live = model.module if isinstance(model, factory.MadeModule) else model
        own = [*live.parameters(), *live.buffers()] if isinstance(live, nn.Module) else []
        try:
            with Untouched(own) if own else nullcontext():
                return _open(built, self, collapsed=collapsed)
        except WrittenTo:  # its forward writes to parameters or buffers: let it write to those of a copy
            return _open(replace(built, module=copy_tensors(built.module)), self, collapsed=collapsed)

    def built_once(self) -> ModelSpec:
        """The same model; a callable has been called, and every `open` gives the weights of this one call."""
        made = isinstance(self.model, str) and is_callable(self.model)
        return replace(self, model=factory.make_module(str(self.model))) if made else self

    def open_complete(self) -> Source:
        """The model with its weights, refused if some of them are missing and would be random."""
        source = self.open(weights=True)
        if source.missing:
            raise DeadweightError(
                f"{printable(source.name)}, opened as {printable(type(source.module).__name__)}: {len(source.missing)} "
                f"parameters are not in the checkpoint and are random, first {printable(source.missing[0])}; expected "
                "a complete checkpoint, or another class in `architectures` of config.json"
            )
        return source

    def whole_module(self) -> nn.Module:
        """The module with all its blocks, on the meta device where a config says the shapes; it is not run."""
        return _build(self.model, weights=False, trust_remote_code=self.trust_remote_code).module.eval()


def open_model(
    model: ModelLike,
    *,
    weights: bool = False,
    inputs: ExampleInputs = None,
    trust_remote_code: bool = False,
    collapsed: bool = False,
) -> Source:
    """`ModelSpec.open` in one call."""
    return ModelSpec(model, inputs, trust_remote_code).open(weights=weights, collapsed=collapsed)


def open_complete(model: ModelLike, *, trust_remote_code: bool = False) -> Source:
    """`ModelSpec.open_complete` in one call."""
    return ModelSpec(model, trust_remote_code=trust_remote_code).open_complete()


def _open(built: hugging_face.Built, spec: ModelSpec, *, collapsed: bool) -> Source:
    shapes = {name: tuple(p.shape) for name, p in built.module.named_parameters()}
    if spec.inputs is None and built.inputs is None and built.config is None:
        inputs, guess = guess_inputs(built.module.train(spec.training), built.name)
        built = replace(built, inputs=inputs.args, notes=(*built.notes, guess))
    if not collapsed:
        return replace(as_source(built, spec), shapes=shapes)
    if spec.inputs is not None or built.inputs is not None:
        return replace(collapse_after_trial(as_source(built, spec)), shapes=shapes)
    record = Record(built.module)
    with record.skimming():
        source = as_source(built, spec)
        try:
            record.watch(lambda watch: run(source.module, source.inputs, watch))
        except Exception:  # noqa: BLE001 - a model that does not run is traced whole: the error is reported there
            record.reset()
    return replace(source, blocks=collapse(source.module, record), shapes=shapes)


def collapse_after_trial(source: Source) -> Source:
    """The source with repeated blocks cut, after one run on the user's inputs; raises if the model does not run.

    A copy is run, because a forward may store something in the module.
    """
    trial = share_tensors(source.module)
    record, held = Record(trial), held_tensors(trial)
    try:
        with record.skimming():
            record.watch(lambda watch: call_model(trial, source, watch))
    except Exception as error:  # noqa: BLE001 - the model is run again below, and its error reported
        record.reset()
        if source.has_weights or not (depends_on_data(error) or isinstance(error, NotImplementedError)):
            expected = [describe_forward(source.module)] if source.config is None else []
            run_or_refuse(source.name, lambda: call_model(share_tensors(source.module), source), *expected)
    notes = kept_note(held, held_tensors(trial))
    return replace(source, blocks=collapse(source.module, record), notes=source.notes + notes)


@torch.no_grad()
def call_model(module: nn.Module, source: Source, watch: AbstractContextManager[object] | None = None) -> Leaf:
    """The model's output for exactly these inputs; without weights, fake tensors of its shapes."""
    if not source.has_weights:
        return run(module, source.inputs, watch)
    args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, (source.args, source.kwargs))
    with watch or nullcontext():
        return module(*args, **kwargs)


def is_callable(model: str | Path) -> bool:
    """Whether this is package.module:callable, and not a file of that name."""
    return factory.looks_like(str(model)) and not Path(model).exists()


def _build(model: ModelLike | factory.MadeModule, *, weights: bool, trust_remote_code: bool) -> hugging_face.Built:
    if isinstance(model, nn.Module):
        return factory.from_module(model)
    if isinstance(model, factory.MadeModule):
        return model.built()
    if not isinstance(model, (str, Path)) or not str(model):
        raise DeadweightError(f"found {printable(repr(model))} as the model; expected a path, a hub id or an nn.Module")
    refuse_impossible_path(model)
    if str(model) == "demo" and not Path(model).exists():
        return replace(
            hugging_face.from_spec(str(embedded.path()), weights=weights, trust_remote_code=False), name="demo"
        )
    if is_callable(model):
        return factory.from_spec(str(model))
    refuse_pickle(Path(model))
    return hugging_face.from_spec(str(model), weights=weights, trust_remote_code=trust_remote_code)


def refuse_impossible_path(path: str | Path) -> None:
    """Raise if the file system rejects the path itself: too long, or an unknown user after ~."""
    try:
        Path(path).expanduser().exists()
    except (OSError, RuntimeError) as error:
        raise DeadweightError(
            f"{printable(path)} cannot be looked up ({reason(error)}); "
            "expected a path, a hub id or package.module:callable"
        ) from error


def as_source(built: hugging_face.Built, spec: ModelSpec) -> Source:
    """The source of a module, with the user's inputs or with examples."""
    module, config = built.module.train(spec.training), built.config
    notes, refusal = built.notes, None
    given = spec.inputs if spec.inputs is not None else built.inputs
    if isinstance(given, str):
        inputs = read_inputs(given, module)
    elif given is not None:
        inputs = as_inputs(given)
    else:
        inputs, refusal = example_inputs(module, config, spec.length)
        absent = left_out(module, inputs)
        notes += (f"the model runs on none of the example inputs that were tried: {refusal}",) if refusal else ()
        notes += (
            (f"the example has no {', '.join(absent)}: parameters only for them are not examined",) if absent else ()
        )
    parameters = list(module.parameters())
    has_weights = not any(p.is_meta for p in parameters)
    if given is not None and config is not None and not has_weights:
        refuse_too_long(config, inputs)
    device = parameters[0].device if parameters else torch.device("cpu")
    floats = [p.dtype for p in parameters if p.is_floating_point()]
    args, kwargs = inputs.on(
        device, floats[0] if floats and config is not None else None
    )  # images for a bfloat16 model
    return Source(
        name=built.name,
        module=module,
        kwargs=kwargs,
        args=args,
        has_weights=has_weights,
        config=config,
        notes=notes,
        inputs=inputs,
        missing=built.missing,
        refusal=refusal,
        quantised=built.quantised,
        stored_dtype=built.stored_dtype,
        trusted=spec.trust_remote_code,
    )
