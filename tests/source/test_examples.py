from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from deadweight.source.model import Source, open_model
from deadweight.source.narrow import shallow_config

# type, class, and the inputs it gets with their shapes
EXPECTED: list[tuple[str, str, dict[str, tuple[int, ...]]]] = [
    ("gpt2", "GPT2LMHeadModel", {"input_ids": (1, 5)}),
    ("bert", "BertModel", {"input_ids": (1, 5), "token_type_ids": (1, 5)}),
    ("t5", "T5ForConditionalGeneration", {"input_ids": (1, 5), "decoder_input_ids": (1, 5)}),
    ("vit", "ViTModel", {"pixel_values": (1, 3, 224, 224)}),
    ("clip", "CLIPModel", {"input_ids": (1, 5), "pixel_values": (1, 3, 224, 224)}),
    ("whisper", "WhisperForConditionalGeneration", {"input_features": (1, 80, 3000), "decoder_input_ids": (1, 5)}),
    ("wav2vec2", "Wav2Vec2Model", {"input_values": (1, 1680)}),
    ("audio-spectrogram-transformer", "ASTModel", {"input_values": (1, 1024, 128)}),
    ("llava", "LlavaForConditionalGeneration", {"input_ids": (1, 5)}),
    ("musicgen_decoder", "MusicgenForCausalLM", {"input_ids": (4, 5)}),
    ("layoutlm", "LayoutLMModel", {"input_ids": (1, 5), "token_type_ids": (1, 5), "bbox": (1, 5, 4)}),
]


def opened(kind: str, architecture: str, folder: Path, **changes: Any) -> Source:
    config = shallow_config(transformers.CONFIG_MAPPING[kind](**changes))
    config.architectures = [architecture]
    config.save_pretrained(folder)
    return open_model(str(folder))


@pytest.mark.parametrize(("kind", "architecture", "shapes"), EXPECTED, ids=[row[0] for row in EXPECTED])
def test_each_kind_of_model_gets_the_inputs_it_runs_with(
    kind: str, architecture: str, shapes: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    source = opened(kind, architecture, tmp_path)
    tensors = {name: tuple(v.shape) for name, v in source.kwargs.items() if isinstance(v, torch.Tensor)}
    assert tensors == shapes and not any("no example input" in note for note in source.notes)


def test_a_short_context_limits_the_length(tmp_path: Path) -> None:
    assert opened("gpt2", "GPT2LMHeadModel", tmp_path, n_positions=3).kwargs["input_ids"].shape == (1, 3)


def test_examples_avoid_tokens_with_a_meaning_and_draws_avoid_placeholders(tmp_path: Path) -> None:
    meanings = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": [2, 4]}
    source = opened("llama", "LlamaForCausalLM", tmp_path, vocab_size=12, **meanings)
    assert not set(source.inputs.kwargs["input_ids"].flatten().tolist()) & {0, 1, 2, 4}
    drawn = {i for seed in range(40) for i in tokens(source, seed)}
    assert drawn == set(range(12)), "a draw covers the whole vocabulary"


def test_draws_never_hold_the_placeholder_of_an_image(tmp_path: Path) -> None:
    source = opened("llava", "LlavaForConditionalGeneration", tmp_path, image_token_index=7)
    assert source.inputs.spans["input_ids"].avoid == (7,)
    assert any("without pixel_values" in note for note in source.notes)


def tokens(source: Source, seed: int) -> list[int]:
    return source.draw(torch.Generator().manual_seed(seed))[1]["input_ids"].flatten().tolist()
