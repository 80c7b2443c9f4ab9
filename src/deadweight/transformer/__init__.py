"""One readable transformer of any shape, and its Hugging Face face."""

from __future__ import annotations

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

from deadweight.transformer.configuration import LayerShape, TransformerConfig
from deadweight.transformer.modeling import TransformerForCausalLM, TransformerForMaskedLM, TransformerModel

AutoConfig.register(TransformerConfig.model_type, TransformerConfig, exist_ok=True)
AutoModel.register(TransformerConfig, TransformerModel, exist_ok=True)
AutoModelForCausalLM.register(TransformerConfig, TransformerForCausalLM, exist_ok=True)
AutoModelForMaskedLM.register(TransformerConfig, TransformerForMaskedLM, exist_ok=True)

for _model, _auto in (
    (TransformerModel, "AutoModel"),
    (TransformerForCausalLM, "AutoModelForCausalLM"),
    (TransformerForMaskedLM, "AutoModelForMaskedLM"),
):
    _model.register_for_auto_class(_auto)  # so that the code is saved with the weights
TransformerConfig.register_for_auto_class()

__all__ = [
    "LayerShape",
    "TransformerConfig",
    "TransformerForCausalLM",
    "TransformerForMaskedLM",
    "TransformerModel",
]
