"""Every kind of model gets example inputs that it runs with."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from deadweight.source.example_makers import MAKERS, Need, text
from deadweight.source.model import Source, open_model
from deadweight.source.narrow_clone import narrow, narrow_config, shallow_config
from deadweight.source.narrow_sizes import Size

# type, class, and the inputs it gets with their shapes
EXPECTED: list[tuple[str, str, dict[str, tuple[int, ...]]]] = [
    ("gpt2", "GPT2LMHeadModel", {"input_ids": (1, 5)}),
    ("bert", "BertModel", {"input_ids": (1, 5), "token_type_ids": (1, 5)}),
    ("roberta", "RobertaForMultipleChoice", {"input_ids": (1, 2, 5), "token_type_ids": (1, 2, 5)}),
    ("t5", "T5ForConditionalGeneration", {"input_ids": (1, 5), "decoder_input_ids": (1, 5)}),
    ("vit", "ViTModel", {"pixel_values": (1, 3, 224, 224)}),
    ("clip", "CLIPModel", {"input_ids": (1, 5), "pixel_values": (1, 3, 224, 224)}),
    ("whisper", "WhisperForConditionalGeneration", {"input_features": (1, 80, 3000), "decoder_input_ids": (1, 5)}),
    ("wav2vec2", "Wav2Vec2Model", {"input_values": (1, 1680)}),
    ("audio-spectrogram-transformer", "ASTModel", {"input_values": (1, 1024, 128)}),
    ("llava", "LlavaForConditionalGeneration", {"input_ids": (1, 5)}),
    ("musicgen_decoder", "MusicgenForCausalLM", {"input_ids": (4, 5)}),
    ("kyutai_speech_to_text", "KyutaiSpeechToTextModel", {"input_ids": (1, 5, 33)}),
    ("dia", "DiaModel", {"input_ids": (1, 5), "decoder_input_ids": (1, 5, 9)}),
    ("fun_asr_nano_encoder", "FunAsrNanoEncoder", {"input_features": (1, 80, 560), "input_features_mask": (1, 80)}),
    ("layoutlm", "LayoutLMModel", {"input_ids": (1, 5), "token_type_ids": (1, 5), "bbox": (1, 5, 4)}),
]

# The same of narrow clones, for inputs that are not text, images or sound alone.
CLONES: list[tuple[str, str, dict[str, tuple[int, ...]]]] = [
    ("blip-2", "Blip2Model", {"pixel_values": (1, 3, 4, 4), "input_ids": (1, 5)}),
    ("blip_2_qformer", "Blip2QFormerModel", {"query_embeds": (1, 5, 8), "encoder_hidden_states": (1, 5, 8)}),
    (
        "instructblip",
        "InstructBlipModel",
        {"pixel_values": (1, 3, 4, 4), "qformer_input_ids": (1, 5), "input_ids": (1, 5)},
    ),
    (
        "idefics",
        "IdeficsModel",
        {"input_ids": (1, 5), "pixel_values": (1, 1, 3, 4, 4), "image_attention_mask": (1, 5, 1)},
    ),
    (
        "kosmos-2",
        "Kosmos2Model",
        {"pixel_values": (1, 3, 4, 4), "input_ids": (1, 5), "image_embeds_position_mask": (1, 5)},
    ),
    (
        "lxmert",
        "LxmertModel",
        {"input_ids": (1, 5), "token_type_ids": (1, 5), "visual_feats": (1, 5, 2048), "visual_pos": (1, 5, 4)},
    ),
    (
        "muse_glimmer_assistant",
        "MuseGlimmerAssistantModel",
        {"noise_embeds": (1, 2, 8), "context_hidden_states": (1, 2, 40)},
    ),
    ("nemotron3_5_transcribe_word_timestamp", "Nemotron3_5TranscribeWordTimestampModel", {"inputs_embeds": (1, 5, 8)}),
    ("perceiver", "PerceiverModel", {"inputs": (1, 5, 8)}),
    ("gemma4_vision", "Gemma4VisionModel", {"pixel_values": (1, 36, 12), "pixel_position_ids": (1, 36, 2)}),
    (
        "siglip2_vision_model",
        "Siglip2VisionModel",
        {"pixel_values": (1, 16, 12), "pixel_attention_mask": (1, 16), "spatial_shapes": (1, 2)},
    ),
    ("minicpm_ocr_vision", "MiniCPMOcrVisionModel", {"pixel_values": (1, 3, 2, 32), "target_sizes": (1, 2)}),
    ("exaone4_5_vision", "Exaone4_5_VisionModel", {"hidden_states": (16, 24), "grid_thw": (1, 3)}),
    ("kimi_k25_vision", "Kimi_K25VisionModel", {"pixel_values": (16, 3, 2, 2), "grid_thw": (1, 3)}),
    (
        "video_llama_3_vision",
        "VideoLlama3VisionModel",
        {"pixel_values": (16, 12), "grid_thw": (1, 3), "merge_sizes": (1,)},
    ),
    (
        "seggpt",
        "SegGptModel",
        {"pixel_values": (1, 3, 2, 4), "prompt_pixel_values": (1, 3, 2, 4), "prompt_masks": (1, 3, 2, 4)},
    ),
    ("speecht5", "SpeechT5Model", {"input_values": (1, 5, 8), "decoder_input_values": (1, 5, 8)}),
    (
        "audioflamingo3_encoder",
        "AudioFlamingo3Encoder",
        {"input_features": (1, 4, 10), "input_features_mask": (1, 10)},
    ),
    ("gemma3n_audio", "Gemma3nAudioEncoder", {"audio_mel": (1, 80, 128), "audio_mel_mask": (1, 80)}),
    ("voxtral_realtime", "VoxtralRealtimeModel", {"input_ids": (1, 5), "input_features": (1, 4, 40)}),
    ("mimi_decoder", "MimiDecoderModel", {"latents": (1, 8, 5)}),
    (
        "informer",
        "InformerModel",
        {
            "past_values": (1, 11),
            "past_time_features": (1, 11, 0),
            "past_observed_mask": (1, 11),
            "future_values": (1, 4),
            "future_time_features": (1, 4, 0),
        },
    ),
    ("timesfm", "TimesFmModel", {"past_values": (1, 128), "past_values_padding": (1, 128), "freq": (1, 1)}),
    (
        "decision_transformer",
        "DecisionTransformerModel",
        {
            "states": (1, 5, 17),
            "actions": (1, 5, 4),
            "rewards": (1, 5, 1),
            "returns_to_go": (1, 5, 1),
            "timesteps": (1, 5),
        },
    ),
]
ELSEWHERE = {"attention_mask", "pixel_values_videos", "task_inputs"}  # a mask is a last resort; the others are slow


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
    assert tensors == shapes and source.refusal is None


def cloned(kind: str, architecture: str, folder: Path) -> Source:
    config = narrow_config(transformers.CONFIG_MAPPING[kind](), Size())
    config.architectures = [architecture]
    config.save_pretrained(folder)
    return narrow(open_model(str(folder)))


@pytest.mark.parametrize(("kind", "architecture", "shapes"), CLONES, ids=[row[0] for row in CLONES])
def test_narrow_clones_run_with_inputs_of_every_kind(
    kind: str, architecture: str, shapes: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    clone = cloned(kind, architecture, tmp_path)
    assert {name: tuple(v.shape) for name, v in clone.kwargs.items() if isinstance(v, torch.Tensor)} == shapes
    args, kwargs = clone.draw(torch.Generator().manual_seed(1))
    outputs = torch.utils._pytree.tree_leaves(clone.module(*args, **kwargs))
    assert any(isinstance(out, torch.Tensor) and torch.isfinite(out).all() for out in outputs)


def test_every_input_name_has_a_model_that_is_tested_with_it() -> None:
    tested = {name for _, _, shapes in (*EXPECTED, *CLONES) for name in shapes}
    assert set(MAKERS) - tested == ELSEWHERE


def test_tokens_of_a_decoder_come_from_its_own_vocabulary(tmp_path: Path) -> None:
    changes = {"vocab_size": 61, "decoder_vocab_size": 47, "share_encoder_decoder_embeddings": False}
    source = opened("marian", "MarianMTModel", tmp_path, **changes, pad_token_id=0, tie_word_embeddings=False)
    spans = source.inputs.spans
    assert spans["input_ids"].high == 60 and spans["decoder_input_ids"].high == 46
    part = transformers.BertConfig(vocab_size=19)
    both = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(transformers.BertConfig(vocab_size=23), part)
    need = Need(both, 5)
    assert text.decoder_tokens(need).span.high == 18 and text.tokens(need).span.high == 22


def test_an_image_has_as_many_placeholders_as_queries(tmp_path: Path) -> None:
    clone = cloned("blip-2", "Blip2Model", tmp_path)
    placeholders = clone.kwargs["input_ids"] == clone.config.image_token_index
    assert int(placeholders.sum()) == clone.config.num_query_tokens == 4


@pytest.mark.parametrize(
    ("kind", "architecture", "words"),
    [
        ("bark", "BarkModel", "it has no forward method"),
        ("sam2_video", "Sam2VideoModel", "its forward requires inference_session, and the config does not say"),
    ],
)
def test_a_model_that_cannot_be_given_an_example_says_why(
    kind: str, architecture: str, words: str, tmp_path: Path
) -> None:
    config = narrow_config(transformers.CONFIG_MAPPING[kind](), Size())
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    assert any(words in note for note in open_model(str(tmp_path)).notes)


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
    assert any("the example has no pixel_values" in note for note in source.notes)


def tokens(source: Source, seed: int) -> list[int]:
    return source.draw(torch.Generator().manual_seed(seed))[1]["input_ids"].flatten().tolist()
