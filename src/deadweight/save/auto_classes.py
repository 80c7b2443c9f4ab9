"""Where transformers finds the class of a model: its Auto classes, and the module that defines it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import transformers
from torch import nn
from transformers.dynamic_module_utils import TRANSFORMERS_DYNAMIC_MODULE_NAME

from deadweight.source.private_api import model_classes
from deadweight.source.type_aliases import Config, JsonObject
from deadweight.transformer.modeling import TransformerPreTrained

OWN_HOME = ".modeling"  # of our own transformer
FIRST_AUTOS = (  # the first that loads a class is the one that a model card names
    "AutoModel",
    "AutoModelForSeq2SeqLM",
    "AutoModelForCausalLM",
    "AutoModelForMaskedLM",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "AutoModelForQuestionAnswering",
    "AutoModelForImageClassification",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForImageTextToText",
)
LAST_AUTO = "AutoModelForPreTraining"


def is_own_code(cls: type[nn.Module]) -> bool:
    """Whether the class is defined by code in the folder of its checkpoint."""
    return cls.__module__.split(".")[0] == TRANSFORMERS_DYNAMIC_MODULE_NAME


def home_of(cls: type[nn.Module]) -> str:
    """The module from which code in the folder of a checkpoint imports the class."""
    if issubclass(cls, TransformerPreTrained):
        return OWN_HOME
    if is_own_code(cls):
        return "." + cls.__module__.rpartition(".")[2]
    return "transformers" if getattr(transformers, cls.__name__, None) is cls else cls.__module__


def auto_map(cls: type[nn.Module], config: Config, raw: JsonObject, slim: str) -> JsonObject:
    """The auto_map of a slim checkpoint: `slim` replaces the class; the original's own config and tokenizer stay."""
    own: JsonObject = (raw.get("auto_map") or {}) if is_own_code(cls) else {}
    kept = {name: where for name, where in own.items() if not name.startswith("AutoModel")}
    return kept | dict.fromkeys(autos_of(cls, config, own) or ["AutoModel"], slim)


def autos_of(cls: type[nn.Module], config: Config, own: JsonObject | None = None) -> list[str]:
    """The Auto classes that load this model class; none, if it can only be loaded by its own name.

    `own` is the auto_map of a checkpoint that defines the class.
    """
    named = [name for name, where in (own or {}).items() if str(where).rpartition(".")[2] == cls.__name__]
    return named or [name for name in auto_names() if cls in classes_of(name, config)]


@cache
def auto_names() -> tuple[str, ...]:
    """All Auto classes of models, the usual ones first."""
    every = sorted(name for name in dir(transformers) if name.startswith("AutoModel") and name != LAST_AUTO)
    return (*dict.fromkeys([*FIRST_AUTOS, *every]), LAST_AUTO)


def classes_of(auto: str, config: Config) -> Sequence[type]:
    """The model classes that an Auto class of transformers has for this kind of config."""
    known = model_classes(getattr(transformers, auto)).get(type(config), ())
    return known if isinstance(known, (tuple, list)) else (known,)
