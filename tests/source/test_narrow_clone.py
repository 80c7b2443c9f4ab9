"""Narrow clones run, keep every kind of layer, and have the published sizes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import BertConfig, BertModel, GPT2Config, LlamaConfig, Qwen2Config

from deadweight.errors import DeadweightError
from deadweight.source.model import Source, open_model
from deadweight.source.narrow_clone import narrow, shallow_config
from deadweight.source.narrow_trials import loosen

FAMILIES = {
    "phi4_multimodal": "Phi4MultimodalForCausalLM",
    "roc_bert": "RoCBertForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "opt": "OPTForCausalLM",
    "bert": "BertForMaskedLM",
    "roberta": "RobertaForMaskedLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "gptj": "GPTJForCausalLM",
    "bloom": "BloomForCausalLM",
    "phi": "PhiForCausalLM",
    "falcon": "FalconForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "t5": "T5ForConditionalGeneration",
    "bart": "BartForConditionalGeneration",
    "vit": "ViTModel",
    "clip": "CLIPModel",
    "whisper": "WhisperForConditionalGeneration",
    "wav2vec2": "Wav2Vec2Model",
    "llava": "LlavaForConditionalGeneration",
}


def opened(config: Any, folder: Path, architecture: str | None = None) -> Source:
    config.architectures = [architecture] if architecture else None
    config.save_pretrained(folder)
    return open_model(str(folder))


def size(source: Source) -> int:
    return sum(p.numel() for p in source.module.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_narrow_clone_of_a_default_config_runs_in_float64(family: str, tmp_path: Path) -> None:
    config = shallow_config(transformers.CONFIG_MAPPING[family]())  # the clone is the same, the opening quicker
    clone = narrow(opened(config, tmp_path, FAMILIES[family]))
    assert type(clone.module).__name__ == FAMILIES[family] and size(clone) < 20_000 and clone.has_weights
    assert all(p.dtype == torch.float64 for p in clone.module.parameters())
    args, kwargs = clone.draw(torch.Generator().manual_seed(1))
    output = clone.module(*args, **kwargs)
    assert torch.isfinite(next(iter(output.values()))).all()


@pytest.mark.parametrize(
    ("config", "n_parameters"),
    [
        (GPT2Config(), 1208),
        (GPT2Config(tie_word_embeddings=False), 1296),
        (LlamaConfig(num_hidden_layers=3), 1304),
        (LlamaConfig(num_hidden_layers=3, num_key_value_heads=8), 1176),
        (LlamaConfig(num_hidden_layers=3, num_key_value_heads=1), 1176),
    ],
)
def test_reference_clones_have_exactly_the_published_size(config: Any, n_parameters: int, tmp_path: Path) -> None:
    assert size(narrow(opened(config, tmp_path))) == n_parameters


def test_an_encoder_without_pooler_stays_without() -> None:
    with torch.device("meta"):
        model = BertModel(BertConfig(type_vocab_size=1), add_pooling_layer=False)
    assert size(narrow(open_model(model))) == 1216


def test_settings_that_the_model_refuses_to_narrow_stay_as_they_are(tmp_path: Path) -> None:
    config = shallow_config(transformers.CONFIG_MAPPING["bit"]())  # its channels come in groups of 32
    clone = narrow(opened(config, tmp_path, "BitModel"))
    assert clone.config.num_groups == 32 and all(n % 32 == 0 for n in clone.config.hidden_sizes)


def test_changes_that_are_refused_are_found_by_halving() -> None:
    wide = {"num_heads": 4, "inner": {"hidden_size": 64, "groups": 32}, "vocab_size": 1000, "stage_names": ["a"]}
    small = {"num_heads": 2, "inner": {"hidden_size": 8, "groups": 32}, "vocab_size": 11}
    tried: list[dict[str, Any]] = []

    def runs(values: dict[str, Any]) -> bool:
        tried.append(values)
        return bool(values["inner"]["hidden_size"] % values["inner"]["groups"] == 0)

    kept = {"num_heads": 2, "inner": {"hidden_size": 64, "groups": 32}, "vocab_size": 11}
    assert loosen(wide, small, runs) == kept and len(tried) <= 6
    assert loosen(wide, small, runs, trials=0) == wide, "without trials nothing changes"


def test_a_clone_that_runs_in_float32_alone_can_be_cloned_again(tmp_path: Path) -> None:
    config = shallow_config(transformers.CONFIG_MAPPING["fsmt"]())  # it writes the least float32 into a mask of float64
    again = narrow(narrow(opened(config, tmp_path, "FSMTModel")))
    assert all(p.dtype == torch.float32 for p in again.module.parameters())


def test_rotary_sections_that_the_code_assumes_are_written_out(tmp_path: Path) -> None:
    config = shallow_config(transformers.CONFIG_MAPPING["qwen2_vl_text"]())
    clone = narrow(opened(config, tmp_path, "Qwen2VLTextModel"))
    assert clone.config.rope_parameters["mrope_section"] == [1, 1, 0]


def test_every_position_of_the_clone_is_used(tmp_path: Path) -> None:
    clone = narrow(opened(GPT2Config(), tmp_path))
    assert clone.config.n_positions == clone.kwargs["input_ids"].shape[1] == 5


def test_every_kind_of_layer_is_kept(tmp_path: Path) -> None:
    kinds = ["full_attention", "full_attention", "sliding_attention", "full_attention"]
    config = Qwen2Config(num_hidden_layers=4, layer_types=kinds, use_sliding_window=True, sliding_window=64)
    clone = narrow(opened(config, tmp_path))
    assert clone.config.layer_types == ["full_attention", "sliding_attention"] and clone.config.sliding_window == 3


def test_part_of_a_head_stays_rotated_in_part(tmp_path: Path) -> None:
    clone = narrow(opened(transformers.PhiConfig(), tmp_path))
    assert clone.config.rope_parameters["partial_rotary_factor"] == 0.5


def test_special_tokens_lie_inside_the_narrow_vocabulary(tmp_path: Path) -> None:
    config = LlamaConfig(num_hidden_layers=3, bos_token_id=128000, eos_token_id=[128001, 128008], pad_token_id=2)
    clone = narrow(opened(config, tmp_path)).config
    ids = [clone.bos_token_id, *clone.eos_token_id, clone.pad_token_id]
    assert len(set(ids)) == 4 and all(0 <= i < 11 for i in ids) and clone.pad_token_id == 2


def test_a_seed_gives_the_same_clone_and_another_seed_another(tmp_path: Path) -> None:
    source = opened(GPT2Config(), tmp_path)
    first, again, other = (narrow(source, seed=s).module.transformer.wte.weight for s in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_a_width_may_be_asked_for(tmp_path: Path) -> None:
    assert narrow(opened(LlamaConfig(num_hidden_layers=3), tmp_path), hidden=16).config.hidden_size == 16


def test_a_small_module_is_its_own_narrow_clone() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    clone = narrow(open_model(module, inputs=torch.randn(3, 4)))
    assert clone.module[0].weight.dtype == torch.float64 and clone.module(*clone.args).dtype == torch.float64
    assert module[0].weight.dtype == torch.float32, "the user's module is left alone"


def test_a_small_config_is_its_own_narrow_clone(folder: Path) -> None:
    assert size(narrow(open_model(str(folder)))) == 1208


def test_a_large_module_without_a_config_has_no_narrow_clone() -> None:
    source = open_model(nn.Linear(200, 200), inputs=torch.randn(1, 200))
    with pytest.raises(
        DeadweightError, match="Linear has 40200 parameters and no config from which to build a narrow clone"
    ):
        narrow(source)
