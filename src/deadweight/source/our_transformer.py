"""Checkpoints of other families as models of our own transformer, by a table of their names.

The biases and query-key norms of a model are read off its parameters, so that one row of the table serves all variants
of a family. A model that our transformer cannot express is refused.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

from deadweight.errors import DeadweightError
from deadweight.source.families import BIASED, FAMILIES, NORMED, REQUIRED_SETTINGS, Family, SourceModule
from deadweight.source.hugging_face_config import locate, read_config
from deadweight.source.type_aliases import Config, Options, PreTrained
from deadweight.transformer.configuration import TransformerConfig
from deadweight.transformer.modeling import TransformerForCausalLM, TransformerModel

INSTEAD = "audit and reduce accept the model as it is"


def import_model(model: nn.Module | str | Path) -> TransformerForCausalLM | TransformerModel:
    """A model of transformers, or of its folder, as a model of our transformer: the same function, copied weights.

    A language model becomes a language model; a base model returns its hidden states, without its pooler. An
    encoder's folder is read as its base model. RoBERTa's positions count from the first token, which is right where
    padding is on the right; where it is on the left, pass position_ids.
    """
    theirs = model if isinstance(model, nn.Module) else open_theirs(str(model))
    family = family_of(theirs)
    check(theirs.config)
    tensors = dict(theirs.named_parameters(remove_duplicate=False))
    causal = type(theirs).__name__ == family.causal
    config = config_of(family, theirs.config, tensors, causal)
    with torch.device("meta"):
        ours = TransformerForCausalLM(config) if causal else TransformerModel(config)
    sources = origins(ours, theirs)
    refuse_leftovers(family, theirs, tensors, sources)
    ours.load_state_dict({n: o.take(tensors[t].detach()).clone() for n, (t, o) in sources.items()}, assign=True)
    ours.tie_weights()
    if causal:
        ours.generation_config = copy.deepcopy(theirs.generation_config)
    return ours.train(theirs.training)


def origins(ours: nn.Module, theirs: PreTrained) -> dict[str, tuple[str, SourceModule]]:
    """For each parameter of ours, the parameter of theirs that holds it, and which part of it."""
    family = family_of(theirs)
    causal = type(theirs).__name__ == family.causal
    result = {}
    for name, _ in ours.named_parameters(remove_duplicate=False):
        module, _, kind = name.removeprefix("transformer.").rpartition(".")
        origin = origin_of(family, module, theirs.config, causal)
        result[name] = (f"{origin.path}.{kind}", origin)
    return result


def origin_of(family: Family, module: str, config: Config, causal: bool) -> SourceModule:
    """The origin of one module of ours, by its full path in theirs."""
    if module == "readout":
        return SourceModule("lm_head")
    index = re.search(r"\.(\d+)\.", module)
    row = family.names[re.sub(r"\.\d+\.", ".{i}.", module)]
    path = (family.prefix if causal else "") + row.path.replace("{i}", index[1] if index else "")
    return replace(row, path=path, first=family.first_position(config) if module == "places" else 0)


def config_of(family: Family, config: Config, tensors: Mapping[str, Tensor], causal: bool) -> TransformerConfig:
    """Our config: settings by name, and the biases and norms that their parameters show."""

    def has(module: str, kind: str) -> bool:
        known = module == "readout" or re.sub(r"\.\d+\.", ".{i}.", module) in family.names
        return known and f"{origin_of(family, module, config, causal).path}.{kind}" in tensors

    given = {ours: s(config) if callable(s) else getattr(config, s) for ours, s in family.settings.items()}
    given |= {norm: has(module, "weight") for norm, module in NORMED.items()}
    name = getattr(config, "activation_function", None) or config.hidden_act
    if name not in family.activations:
        raise refusal(f"activation {name!r}", " or ".join(family.activations), "this transformer has no other")
    return TransformerConfig(
        **given,
        **family.fixed,
        activation=family.activations[name],
        biases=[bias for bias, module in BIASED.items() if has(module, "bias")],
    )


def row_of(config: Config) -> Family:
    """The row of a model's type."""
    kind = getattr(config, "model_type", None)
    if kind not in FAMILIES:
        raise refusal(f"a model of type {kind}", " or ".join(FAMILIES), "no other has a row in the table of families")
    return FAMILIES[kind]


def family_of(model: PreTrained) -> Family:
    """The row of a model's type, if the model is of one of its classes."""
    family = row_of(getattr(model, "config", None))
    classes = [c for c in (family.base, family.causal) if c]
    if type(model).__name__ not in classes:
        raise DeadweightError(
            f"found a {type(model).__name__}; expected {' or '.join(classes)}: import its base_model instead"
        )
    return family


def check(config: Config) -> None:
    """Raise for a setting that would make our transformer another function."""
    for setting in REQUIRED_SETTINGS:
        value = setting.read(config)
        if value not in setting.expected:
            wanted = " or ".join(str(e) for e in setting.expected if e is not None) or "none"
            raise refusal(
                f"{setting.name} = {value!r}", wanted, f"{setting.otherwise}, which this transformer does not support"
            )


def refusal(given: str, expected: str, why: str) -> DeadweightError:
    return DeadweightError(f"found {given}; expected {expected}: {why}; {INSTEAD}")


def refuse_leftovers(
    family: Family, theirs: nn.Module, tensors: Mapping[str, Tensor], sources: Mapping[str, tuple[str, SourceModule]]
) -> None:
    """Raise if a parameter of theirs would be lost, or if one of ours is missing."""
    used = {name for name, _ in sources.values()}
    if missing := sorted(used - set(tensors)):
        raise DeadweightError(
            f"found no {missing[0]} in the {type(theirs).__name__}; expected a plain model of transformers; {INSTEAD}"
        )
    for name in leftovers(family, tensors, used):
        raise refusal(f"the parameter {name}", "only those of a plain model", "this transformer has none like it")


def leftovers(family: Family, tensors: Mapping[str, Tensor], used: set[str]) -> Iterator[str]:
    kept = {id(tensors[name]) for name in used}
    for name, tensor in tensors.items():
        if name not in used and id(tensor) not in kept and not name.startswith(family.spare or ("\0",)):
            yield name


def open_theirs(spec: str) -> PreTrained:
    """The model of a folder or hub id, in its own precision, with no weight missing."""
    from deadweight.source.hugging_face import load_weights, without_bars  # it imports us

    location = locate(spec)
    config = read_config(location)
    family = row_of(config)
    wanted = (getattr(config, "architectures", None) or [None])[0]
    name = family.base if family.causal is None or wanted == family.base else family.causal
    options: Options = {"config": config, "dtype": "auto", "use_safetensors": True, **family.options}
    with without_bars():
        model, names = load_weights(getattr(transformers, name), location.root, options)
    if names.missing:
        raise DeadweightError(f"{spec} has no {names.missing[0]}; expected a complete checkpoint of a {name}")
    return model
