"""Checkpoints of other families in the one transformer, by a table of their names.

Which biases and which query-key norms a model has is read off its parameters, so that one row of the table serves all
of a family's variants. What the transformer cannot express is refused.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from deadweight.errors import DeadweightError
from deadweight.source.families import BIASED, FAMILIES, LIMITS, NORMED, Family, Origin
from deadweight.source.kinds import Config, Options
from deadweight.transformer.configuration import TransformerConfig
from deadweight.transformer.modeling import TransformerForCausalLM, TransformerModel

INSTEAD = "audit and reduce take the model as it is"


def imported(model: nn.Module | str | Path) -> TransformerForCausalLM | TransformerModel:
    """The same function as a model of transformers, or of its folder, in our transformer: a copy, in its precision.

    A language model becomes one; a base model gives its hidden states, and a pooler behind them is left out. An
    encoder's folder is read as its base model. RoBERTa's tokens are taken to count from the first, as they do where
    padding is on the right; where it is on the left, pass position_ids.
    """
    theirs = model if isinstance(model, nn.Module) else opened(str(model))
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


def origins(ours: nn.Module, theirs: Any) -> dict[str, tuple[str, Origin]]:
    """For each parameter of ours, the parameter of theirs that holds it, and where in it."""
    family = family_of(theirs)
    causal = type(theirs).__name__ == family.causal
    result = {}
    for name, _ in ours.named_parameters(remove_duplicate=False):
        module, _, kind = name.removeprefix("transformer.").rpartition(".")
        origin = origin_of(family, module, theirs.config, causal)
        result[name] = (f"{origin.path}.{kind}", origin)
    return result


def origin_of(family: Family, module: str, config: Config, causal: bool) -> Origin:
    """The origin of one module of ours, by its full path in theirs."""
    if module == "readout":
        return Origin("lm_head")
    index = re.search(r"\.(\d+)\.", module)
    row = family.names[re.sub(r"\.\d+\.", ".{i}.", module)]
    path = (family.prefix if causal else "") + row.path.replace("{i}", index[1] if index else "")
    return replace(row, path=path, first=family.first_position(config) if module == "places" else 0)


def config_of(family: Family, config: Config, tensors: Mapping[str, Tensor], causal: bool) -> TransformerConfig:
    """Our config: settings by name, and what their parameters show to be there."""

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


def family_of(model: Any) -> Family:
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
    for limit in LIMITS:
        value = limit.read(config)
        if value not in limit.expected:
            wanted = " or ".join(str(e) for e in limit.expected if e is not None) or "none"
            raise refusal(f"{limit.name} = {value!r}", wanted, f"{limit.why}, which this transformer does not know")


def refusal(found: str, expected: str, why: str) -> DeadweightError:
    return DeadweightError(f"found {found}; expected {expected}: {why}; {INSTEAD}")


def refuse_leftovers(
    family: Family, theirs: nn.Module, tensors: Mapping[str, Tensor], sources: Mapping[str, tuple[str, Origin]]
) -> None:
    """Raise if a parameter would be lost or would have to be made up."""
    used = {name for name, _ in sources.values()}
    if missing := sorted(used - set(tensors)):
        raise DeadweightError(
            f"found no {missing[0]} in the {type(theirs).__name__}; expected a plain model of transformers; {INSTEAD}"
        )
    for name in leftovers(family, tensors, used):
        raise refusal(f"the parameter {name}", "only those of a plain model", "this transformer has no place for it")


def leftovers(family: Family, tensors: Mapping[str, Tensor], used: set[str]) -> Iterator[str]:
    kept = {id(tensors[name]) for name in used}
    for name, tensor in tensors.items():
        if name not in used and id(tensor) not in kept and not name.startswith(family.spare or ("\0",)):
            yield name


def opened(spec: str) -> Any:
    """The model of a folder or hub id, in its own precision, with no weight missing."""
    from deadweight.source.hugging import locate, read_config, without_bars  # that stage opens our models too

    place = locate(spec)
    config = read_config(place)
    family = row_of(config)
    wanted = (getattr(config, "architectures", None) or [None])[0]
    name = family.base if family.causal is None or wanted == family.base else family.causal
    options: Options = {"config": config, "dtype": "auto", "use_safetensors": True, **family.options}
    with without_bars():
        model, info = getattr(transformers, name).from_pretrained(place.root, output_loading_info=True, **options)
    if missing := sorted(info["missing_keys"]):
        raise DeadweightError(f"{spec} has no {missing[0]}; expected a complete checkpoint of a {name}")
    return model
