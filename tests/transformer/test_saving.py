"""A saved transformer loads again: with this package by its own classes, without it by the code in its folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel

import deadweight
from deadweight.source.randomise import randomise
from deadweight.transformer import TransformerConfig, TransformerForCausalLM, TransformerForMaskedLM, TransformerModel

IDS = torch.tensor([[3, 1, 4, 1, 5]])
SMALL = {"vocab_size": 11, "context": 12, "d_model": 8, "n_layers": 2, "heads": [1, 2], "d_v": [4, 2], "hidden": 12}
MIXED = {"positions": "rotary", "query": ["identity", "full"], "biases": ["value", "norm"], "key_norm": True}
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "decoder": (TransformerForCausalLM, AutoModelForCausalLM, MIXED),
    "decoder, untied, shared": (
        TransformerForCausalLM,
        AutoModelForCausalLM,
        {"heads": 2, "d_v": 3, "shared_layers": True, "tie_word_embeddings": False},
    ),
    "encoder": (TransformerForMaskedLM, AutoModelForMaskedLM, {"causal": False, "token_types": 2}),
    "hidden states": (TransformerModel, AutoModel, {"learned_scale": True}),
}
STRANGER = """
import sys
sys.modules["deadweight"] = None  # as where it is not installed
import torch
from transformers import AutoModelForCausalLM
ids = torch.tensor([[3, 1, 4, 1, 5]])
for folder in sys.argv[1:]:
    try:
        AutoModelForCausalLM.from_pretrained(folder)
    except ValueError as error:
        out = {"unasked": "trust_remote_code" in str(error)}
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    out["logits"] = model(ids).logits
    out["written"] = model.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)
    out["stored"] = sum(p.numel() for p in model.parameters())
    model.save_pretrained(folder + "-again")
    torch.save(out, folder + ".pt")
"""


def made(name: str) -> PreTrainedModel:
    cls, _, changes = MODELS[name]
    return randomise(cls(TransformerConfig(**SMALL | changes)).eval())  # type: ignore[return-value]


def in_another_process(*folders: Path) -> list[dict[str, Any]]:
    """What a process without deadweight makes of decoders' folders."""
    home = folders[0].parent
    env = os.environ | {"HF_MODULES_CACHE": str(home / "modules"), "HF_HUB_OFFLINE": "1"}
    env.pop("PYTHONPATH", None)
    call = [sys.executable, "-c", STRANGER, *map(str, folders)]
    done = subprocess.run(call, env=env, input="", capture_output=True, text=True, cwd=home, timeout=180)
    assert not done.returncode, done.stderr
    return [torch.load(f"{folder}.pt", weights_only=True) for folder in folders]


@pytest.mark.parametrize("name", MODELS)
def test_here_a_saved_model_loads_with_its_own_class_and_no_code_of_the_folder(name: str, tmp_path: Path) -> None:
    model, auto = made(name), MODELS[name][1]
    model.save_pretrained(tmp_path)
    for file in tmp_path.glob("*.py"):
        file.write_text("raise SystemExit('code of the folder was run')")
    for trust in (False, True):
        again = auto.from_pretrained(tmp_path, trust_remote_code=trust)
        assert type(again) is type(model) and again.config.layers == model.config.layers
        torch.testing.assert_close(again(IDS)[0], model(IDS)[0])


def test_the_weights_of_identities_are_in_no_file(tmp_path: Path) -> None:
    model = made("decoder")
    model.save_pretrained(tmp_path)
    from safetensors.torch import load_file

    stored = load_file(tmp_path / "model.safetensors")
    assert "transformer.layers.1.attention.query.weight" in stored
    assert "transformer.layers.0.attention.query.weight" not in stored
    assert sum(t.numel() for t in stored.values()) == sum(p.numel() for p in model.parameters())


def test_elsewhere_saved_and_reduced_models_bring_their_code(tmp_path: Path) -> None:
    model = made("decoder").float()
    model.save_pretrained(tmp_path / "saved")
    reduced = deadweight.reduce(tmp_path / "saved", tmp_path / "slim")
    written = model.generate(IDS, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)
    saved, slim = in_another_process(tmp_path / "saved", tmp_path / "slim")
    for found in (saved, slim):
        assert found["unasked"], "none of that code runs unasked"
        assert torch.equal(found["written"], written)
    torch.testing.assert_close(saved["logits"], model(IDS).logits)
    assert slim["stored"] == reduced.parameters_after < saved["stored"]
    ours = deadweight.load(tmp_path / "slim")
    torch.testing.assert_close(slim["logits"], ours(IDS).logits)
    for name, same in (("saved-again", model), ("slim-again", ours)):  # what the other process saved
        torch.testing.assert_close(deadweight.load(tmp_path / name)(IDS).logits, same(IDS).logits)


def test_a_config_alone_is_enough_for_a_new_model(tmp_path: Path) -> None:
    made("decoder").config.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert (
        type(config) is TransformerConfig and type(AutoModelForCausalLM.from_config(config)) is TransformerForCausalLM
    )
