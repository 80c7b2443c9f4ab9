"""The class of transformers, or of our own, that a config means."""

from __future__ import annotations

import transformers
from transformers import PreTrainedModel

from deadweight.slim.load import is_slim, slim_class
from deadweight.source.private_api import model_classes
from deadweight.source.type_aliases import AutoClass, Config
from deadweight.transformer import TransformerConfig, TransformerForCausalLM, TransformerForMaskedLM, TransformerModel

OWN = {cls.__name__: cls for cls in (TransformerModel, TransformerForCausalLM, TransformerForMaskedLM)}
DECODER = (transformers.AutoModelForCausalLM, transformers.AutoModel)
ENCODER = (transformers.AutoModelForMaskedLM, transformers.AutoModelForCausalLM, transformers.AutoModel)
BOTH = (transformers.AutoModelForSeq2SeqLM, transformers.AutoModel)


def model_class(config: Config) -> type[PreTrainedModel] | None:
    """The class that the config names, or else the one that transformers has for its type."""
    for name in getattr(config, "architectures", None) or ():
        known = _class_named(config, name.removeprefix("Slim")) if isinstance(name, str) else None
        if isinstance(known, type) and issubclass(known, PreTrainedModel):
            return _slim_or_not(known, config)
    for auto in _autos(config):
        if type(config) in model_classes(auto):
            classes = model_classes(auto)[type(config)]
            return _slim_or_not(classes[0] if isinstance(classes, (tuple, list)) else classes, config)
    return None


def trusted_class(config: Config) -> AutoClass | None:
    """The Auto class that finds the model's class in the code of its own folder."""
    return next((auto for auto in _autos(config) if has_own_code(config, auto.__name__)), None)


def _class_named(config: Config, name: str) -> type | None:
    """A class of transformers; for our own transformer always ours, whatever code is in the folder."""
    return OWN.get(name) if isinstance(config, TransformerConfig) else getattr(transformers, name, None)


def _slim_or_not(cls: type[PreTrainedModel], config: Config) -> type[PreTrainedModel]:
    """A slim checkpoint of ours has the same class with smaller layers."""
    return slim_class(cls) if is_slim(config) else cls


def _autos(config: Config) -> tuple[AutoClass, ...]:
    if getattr(config, "is_encoder_decoder", False):
        return BOTH
    masked = type(config) in model_classes(transformers.AutoModelForMaskedLM)
    decoder = getattr(config, "is_decoder", False) or getattr(config, "causal", False)
    return ENCODER if masked and not decoder else DECODER


def has_own_code(config: Config, auto: str) -> bool:
    """Whether the config names a class in its own folder for this Auto class."""
    return auto in (getattr(config, "auto_map", None) or {})
