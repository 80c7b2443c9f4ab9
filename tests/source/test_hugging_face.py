"""Folders, configs and hub ids are opened, with and without weights, or refused in one line."""

import json
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM, MixtralConfig

from deadweight.errors import DeadweightError
from deadweight.source.model import ModelSpec, open_model


def test_a_folder_is_opened_without_reading_its_weights(folder: Path) -> None:
    source = open_model(str(folder))
    assert not source.has_weights and all(p.is_meta for p in source.module.parameters())
    assert type(source.module).__name__ == "GPT2LMHeadModel" and not source.module.training


def test_tied_parameters_are_tied_on_the_meta_device(folder: Path) -> None:
    module = open_model(str(folder)).module
    assert module.lm_head.weight is module.transformer.wte.weight


def test_a_folder_is_opened_with_its_weights_and_they_are_its_own(folder: Path) -> None:
    from safetensors.torch import load_file

    source = open_model(str(folder), weights=True)
    saved = load_file(folder / "model.safetensors")["transformer.wte.weight"]
    assert source.has_weights and torch.equal(source.module.transformer.wte.weight, saved) and not source.notes


def test_weights_keep_their_precision(folder: Path) -> None:
    open_model(str(folder), weights=True).module.bfloat16().save_pretrained(folder)
    assert next(open_model(str(folder), weights=True).module.parameters()).dtype == torch.bfloat16


def test_a_checkpoint_that_lacks_a_parameter_says_so(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["transformer.ln_f.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert "transformer.ln_f.weight" in open_model(str(folder), weights=True).notes[0]


def test_a_config_alone_is_enough_even_for_billions_of_parameters(config_folder: Path) -> None:
    source = open_model(str(config_folder / "config.json"))
    assert sum(p.numel() for p in source.module.parameters()) > 6e9 and not source.has_weights
    with pytest.raises(DeadweightError, match="a config without weights"):
        open_model(str(config_folder / "config.json"), weights=True)


def test_attention_is_eager_and_nothing_is_cached(config_folder: Path) -> None:
    source = open_model(str(config_folder))
    assert source.module.config._attn_implementation == "eager" and source.config.use_cache is False
    assert source.kwargs["use_cache"] is False


def test_a_mixture_of_experts_is_traced_without_looking_at_its_data(tmp_path: Path) -> None:
    MixtralConfig(num_hidden_layers=1, hidden_size=64, intermediate_size=64).save_pretrained(tmp_path)
    source = open_model(str(tmp_path))
    traced = torch.export.export(source.module, source.args, source.kwargs, strict=False)
    assert not traced.range_constraints  # no size depends on what the router chose


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ("[1]", "holds a list; expected a JSON object"),
        ("{}", "has model_type None"),
        ('{"model_type": 3}', "has model_type 3"),
        ('{"model_type": "\\u001b[31mx"}', "expected one that transformers"),
        ('{"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}', "--trust-remote-code"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "rejects|cannot be built"),
        ('{"model_type": "llama", "num_attention_heads": 0}', "rejects|cannot be built"),
    ],
)
def test_a_bad_config_says_what_is_wrong_on_one_printable_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    for spec in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(DeadweightError, match=message) as caught:
            open_model(str(spec))
        assert str(caught.value).isprintable()


def test_an_architecture_that_is_no_model_is_not_called(tmp_path: Path, tiny_config: GPT2Config) -> None:
    tiny_config.architectures = ["AutoTokenizer"]
    tiny_config.save_pretrained(tmp_path)
    assert type(open_model(str(tmp_path)).module).__name__ == "GPT2LMHeadModel"


@pytest.mark.parametrize("trusted", [False, True])
def test_code_of_its_own_that_is_not_run_is_noted(tmp_path: Path, tiny_config: GPT2Config, trusted: bool) -> None:
    tiny_config.save_pretrained(tmp_path)
    assert not open_model(str(tmp_path), trust_remote_code=trusted).notes
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["auto_map"] = {"AutoModelForCausalLM": "modeling_mine.Mine"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    notes = open_model(str(tmp_path), trust_remote_code=trusted).notes
    assert len(notes) == 1 and "auto_map), which was not run: opened as GPT2LMHeadModel" in notes[0]


def test_a_quantised_checkpoint_is_opened_as_if_it_were_not(tmp_path: Path, tiny_config: GPT2Config) -> None:
    tiny_config.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert "quantised" in open_model(str(tmp_path)).notes[0]


@pytest.mark.parametrize("spec", ["./absent", "/absent/model", "absent/config.json", "a/b/c", "absent.gguf"])
def test_a_path_that_does_not_exist_is_not_looked_for_on_the_hub(spec: str) -> None:
    with pytest.raises(DeadweightError, match="does not exist"):
        open_model(spec)


def test_a_hub_id_that_cannot_be_fetched_says_what_else_was_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("transformers.utils.hub._is_offline_mode", True, raising=False)
    with pytest.raises(DeadweightError, match="could not be fetched as a hub id"):
        open_model("nobody/no-such-model")


def test_a_folder_without_a_config_and_a_strange_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DeadweightError, match=r"without config\.json"):
        open_model(str(tmp_path))
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(DeadweightError, match=r"is a \.txt file"):
        open_model(str(tmp_path / "notes.txt"))


def test_inputs_and_length_may_be_chosen(config_folder: Path) -> None:
    assert ModelSpec(str(config_folder), length=3).open().kwargs["input_ids"].shape == (1, 3)
    chosen = open_model(str(config_folder), inputs={"input_ids": torch.ones(2, 4, dtype=torch.long)})
    assert chosen.kwargs["input_ids"].shape == (2, 4) and chosen.kwargs["input_ids"].is_meta


def test_the_users_config_object_is_left_alone() -> None:
    config = LlamaConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=12, vocab_size=11)
    model = LlamaForCausalLM(config)
    open_model(model)
    assert config.use_cache is True
