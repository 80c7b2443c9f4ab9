"""Every class is loaded by the Auto class that has it: heads are not lost, and classes without one keep their name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as T

import deadweight
from deadweight.save.auto_classes import autos_of
from deadweight.save.how_to_load import how_to_load

FIRST = {
    "BertModel": "AutoModel",
    "BertForMaskedLM": "AutoModelForMaskedLM",
    "BertForPreTraining": "AutoModelForPreTraining",
    "BertForNextSentencePrediction": "AutoModelForNextSentencePrediction",
    "BertForMultipleChoice": "AutoModelForMultipleChoice",
    "GPT2LMHeadModel": "AutoModelForCausalLM",
    "BartForConditionalGeneration": "AutoModelForSeq2SeqLM",
    "T5EncoderModel": "AutoModelForTextEncoding",
    "Wav2Vec2ForCTC": "AutoModelForCTC",
    "Wav2Vec2ForSequenceClassification": "AutoModelForAudioClassification",
    "DetrForObjectDetection": "AutoModelForObjectDetection",
    "SegformerForSemanticSegmentation": "AutoModelForSemanticSegmentation",
    "CLIPModel": "AutoModel",
}


@pytest.mark.parametrize("name", FIRST)
def test_a_class_is_loaded_by_an_auto_class_that_has_it(name: str) -> None:
    cls = getattr(T, name)
    assert autos_of(cls, cls.config_class())[0] == FIRST[name]


def test_a_class_that_no_auto_class_has_is_loaded_by_its_own_name() -> None:
    cls, config = T.GPT2DoubleHeadsModel, T.GPT2Config()
    assert autos_of(cls, config) == []
    assert "GPT2DoubleHeadsModel.from_pretrained" in how_to_load("out", cls, config, slim=False)
    assert "AutoModel.from_pretrained" in how_to_load("out", cls, config, slim=True)


def test_a_slim_model_keeps_its_head_in_the_auto_class_of_its_task(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    torch.manual_seed(0)
    model = T.BertForMultipleChoice(T.BertConfig(**sizes, vocab_size=31, max_position_embeddings=32)).eval()
    model.save_pretrained(tmp_path / "source")
    deadweight.reduce(tmp_path / "source", tmp_path / "slim")
    again = T.AutoModelForMultipleChoice.from_pretrained(tmp_path / "slim", trust_remote_code=True).eval()
    ids = torch.randint(0, 31, (2, 3, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(again(ids).logits, model(ids).logits, atol=1e-5)
