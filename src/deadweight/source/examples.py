"""Example inputs of a Hugging Face model, from its config and the signature of its forward."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.utils import _pytree as pytree

from deadweight.errors import DeadweightError
from deadweight.silence import silenced
from deadweight.source.example_makers import COMPANIONS, MAKERS, PARTNERS, SIGNALS, Example, Need, first, setting
from deadweight.source.inputs import Inputs
from deadweight.source.printable import reason
from deadweight.source.private_api import model_classes
from deadweight.source.remembered_results import forgetting_results
from deadweight.source.type_aliases import Config, Leaf

LENGTH = 5
N_CHOICES = 2  # of a model that chooses one of several texts
POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions")
FLAGS = {"use_cache": False}  # passed where the forward names them
SHAPES = 12  # combinations of shapes that are tried for the same names
DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
NO_FORWARD = "it has no forward method, only others such as generate"
NO_NAME = "its forward has no argument with a known input name"
REQUIRED = "its forward requires {}, and the config does not say how to make an example of it"


def n_positions(config: Config) -> int | None:
    """How many positions the config says that the model has."""
    positions = first(setting(config, *POSITIONS, default=None))
    return positions if isinstance(positions, int) and positions > 0 else None


def text_length(config: Config, length: int | None) -> int:
    """The requested length, or a short one that the model's positions allow."""
    limit = n_positions(config)
    if length is not None and limit is not None and length > limit:
        raise DeadweightError(f"found length {length}; expected at most {limit}, the number of positions of the model")
    return length or min(LENGTH, limit or LENGTH)


def refuse_too_long(config: Config, inputs: Inputs) -> None:
    """Raise for given tokens that need more positions than the model has: without weights nothing else would notice."""
    tokens = [inputs.kwargs.get("input_ids"), *inputs.args[:1]]
    for ids in tokens:
        if isinstance(ids, torch.Tensor) and ids.dtype in (torch.int64, torch.int32) and ids.ndim == 2:
            text_length(config, ids.shape[1])


def candidates(
    module: nn.Module, config: Config, length: int | None = None, only: tuple[str, ...] = ()
) -> Iterator[Inputs]:
    """Inputs to try, the simplest first; with exactly the names in `only`, if given."""
    accepted = inspect.signature(module.forward).parameters
    flags = {name: value for name, value in FLAGS.items() if name in accepted}
    n_choices = N_CHOICES if is_multiple_choice(module, config) else 1
    n_tokens = text_length(config, length)
    for names in [only] if only else name_sets(module, config, accepted):
        for made in _shapes(Need(config, n_tokens, names)):
            made = with_choices(made, n_choices) if n_choices > 1 else made
            spans = {n: e.span for n, e in made.items() if e.fixed or not e.value.is_floating_point()}
            yield Inputs((), {n: e.value for n, e in made.items()} | flags, spans)


def is_multiple_choice(module: nn.Module, config: Config) -> bool:
    """Whether every sample is several texts, of which the model chooses one."""
    known = model_classes(transformers.AutoModelForMultipleChoice).get(type(config), ())
    return isinstance(module, tuple(known) if isinstance(known, (tuple, list)) else known)


def with_choices(made: dict[str, Example], n_choices: int) -> dict[str, Example]:
    """The same inputs, every sample with several choices: (batch, choice, …)."""
    return {name: replace(e, value=torch.stack([e.value] * n_choices, dim=1)) for name, e in made.items()}


def name_sets(module: nn.Module, config: Config, accepted: Mapping[str, inspect.Parameter]) -> list[tuple[str, ...]]:
    """The main input alone, then with a mask, with its companions, with other signals, and with all of them."""
    alone = _plain_names(module, config, accepted)
    main = [*alone, *(other for name in alone for other in PARTNERS.get(name, ()))]
    signals = [name for name in (*SIGNALS, "input_ids") if name in accepted and name not in main]
    sets = [main, [*main, "attention_mask"], _with_companions(main), [*_with_companions(main), "attention_mask"]]
    for several in (signals[:1], signals[1:2], signals):
        sets += [[*main, *several], [*main, *several, "attention_mask"], _with_companions([*main, *several])]
    sets += [alone, [*alone, "attention_mask"]]
    known = [tuple(n for n in dict.fromkeys(names) if n in accepted) for names in sets]
    return [names for names in dict.fromkeys(known) if names]


def _with_companions(names: list[str]) -> list[str]:
    return [*names, *(other for name in names for other in COMPANIONS.get(name, ()))]


def _plain_names(module: nn.Module, config: Config, accepted: Mapping[str, inspect.Parameter]) -> list[str]:
    main = getattr(module, "main_input_name", "input_ids")
    names = [n for n in (main if isinstance(main, (list, tuple)) else [main]) if n in MAKERS and n in accepted]
    required = [n for n, p in accepted.items() if p.default is p.empty and n in MAKERS]
    if setting(config, "is_encoder_decoder", default=False) and "decoder_input_ids" in accepted:
        names.append("decoder_input_ids")
    if "token_type_ids" in accepted and "input_ids" in names and int(getattr(config, "type_vocab_size", 1) or 1) > 1:
        names.append("token_type_ids")
    return list(dict.fromkeys([*names, *required]))


def _shapes(need: Need) -> Iterator[dict[str, Example]]:
    """Examples of these names in their possible shapes, the likeliest first."""
    each = [_distinct(name, need) for name in need.names]
    choices = itertools.product(*(range(len(examples)) for examples in each))
    for choice in sorted(choices, key=sum)[:SHAPES]:
        yield {name: examples[i] for name, examples, i in zip(need.names, each, choice, strict=True)}


def _distinct(name: str, need: Need) -> list[Example]:
    """The examples that the makers of this name return, each shape and dtype once."""
    distinct: dict[tuple[torch.Size, torch.dtype], Example] = {}
    for maker in MAKERS[name]:
        if (example := maker(need)) is not None:
            distinct.setdefault((example.value.shape, example.value.dtype), example)
    return list(distinct.values())


def example_inputs(module: nn.Module, config: Config, length: int | None = None) -> tuple[Inputs, str | None]:
    """The first inputs on which the model runs, and None; or the likeliest ones, and why it does not run on them."""
    if not has_forward(module):
        return Inputs(), NO_FORWARD
    inputs, error = first_that_runs(module, candidates(module, config, length))
    if inputs is None:
        return Inputs(), unknown_names(module)
    return inputs, None if error is None else reason(error)


def unknown_names(module: nn.Module) -> str:
    """Why there is no example: the required inputs for which there is no maker."""
    parameters = inspect.signature(module.forward).parameters.items()
    required = [n for n, p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD and n not in MAKERS]
    return REQUIRED.format(", ".join(required)) if required else NO_NAME


def first_that_runs(module: nn.Module, tries: Iterable[Inputs]) -> tuple[Inputs | None, Exception | None]:
    """The first inputs on which the model runs, and None; else the likeliest, and the error."""
    tried: list[tuple[Inputs, Exception]] = []
    for inputs in tries:
        try:
            run(module, inputs)
        except Exception as error:  # noqa: BLE001 - the model's own code: on any error, try the next
            tried.append((inputs, error))
        else:
            return inputs, None
    likeliest = [t for t in tried if depends_on_data(t[1])] or tried
    return likeliest[0] if likeliest else (None, None)


def depends_on_data(error: Exception) -> bool:
    """Whether a model on fake tensors failed where its code reads a value: then its inputs had the right shapes."""
    return isinstance(error, DATA_DEPENDENT) or "SymIntArrayRef expected to contain only concrete" in str(error)


def has_forward(module: nn.Module) -> bool:
    return getattr(type(module), "forward", None) is not nn.Module.forward


def left_out(module: nn.Module, inputs: Inputs) -> tuple[str, ...]:
    """The signals (images, sound) that the model accepts and this example does not have."""
    accepted = inspect.signature(module.forward).parameters
    return tuple(name for name in SIGNALS if name in accepted and name not in inputs.kwargs)


def with_all_signals(module: nn.Module, config: Config, inputs: Inputs, length: int | None = None) -> Inputs | None:
    """These inputs with the signals that they leave out; None if there are none, or if the model does not run so."""
    absent = left_out(module, inputs)
    if not absent:
        return None
    accepted = inspect.signature(module.forward).parameters
    names = [*(n for n in inputs.kwargs if n in MAKERS), *absent]
    sets = (names, [*names, "attention_mask"], _with_companions(names))
    known = dict.fromkeys(tuple(n for n in dict.fromkeys(each) if n in accepted) for each in sets)
    tries = (made for only in known for made in candidates(module, config, length, only))
    found, error = first_that_runs(module, tries)
    return None if error is not None else found


@torch.no_grad()
def run(module: nn.Module, inputs: Inputs, watch: contextlib.AbstractContextManager[object] | None = None) -> Leaf:
    """The model's output for these inputs, in its own device and precision; on the meta device, fake tensors.

    `watch` is a context in which only the model runs.
    """
    watch = watch or contextlib.nullcontext()
    like = next(module.parameters(), torch.zeros(()))
    args, kwargs = inputs.on(like.device, like.dtype if like.is_floating_point() else None)
    if not like.is_meta:
        with watch:
            return module(*args, **kwargs)
    # Fake tensors, as when tracing: with tensors on the meta device, some code of transformers would read values.
    # torch logs a traceback for every op that fails on them; here a failure is an expected result.
    fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with fake as mode, silenced("torch._subclasses.fake_tensor", "torch.__trace"):
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda tensor: mode.from_tensor(tensor, static_shapes=True), (args, kwargs)
        )
        with watch, forgetting_results(module):
            return module(*args, **kwargs)
