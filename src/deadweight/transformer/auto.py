"""Our transformer, known to the Auto classes of transformers."""

from __future__ import annotations

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

from deadweight.transformer.configuration import TransformerConfig
from deadweight.transformer.modeling import TransformerForCausalLM, TransformerForMaskedLM, TransformerModel
from deadweight.transformer.slim_hint import add_slim_hint

__all__ = ["TransformerConfig", "TransformerForCausalLM", "TransformerForMaskedLM", "TransformerModel"]

AutoConfig.register(TransformerConfig.model_type, TransformerConfig, exist_ok=True)
TransformerConfig.register_for_auto_class()  # so that the code is saved with the weights
for _model, _auto in (
    (TransformerModel, AutoModel),
    (TransformerForCausalLM, AutoModelForCausalLM),
    (TransformerForMaskedLM, AutoModelForMaskedLM),
):
    _auto.register(TransformerConfig, _model, exist_ok=True)
    _model.register_for_auto_class(_auto.__name__)
add_slim_hint()
