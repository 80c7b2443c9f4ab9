"""What was written is used where deadweight is not installed: the same logits, the same 200 tokens."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

import deadweight
from deadweight import embedded

from .conftest import randomise

NEW = 200
FRESH = """
import json, sys
sys.modules["deadweight"] = None  # importing it fails, as where it is not installed
import torch, transformers
from safetensors.torch import save_file
torch.set_num_threads(1)
folder, prompt, trust, new, out = json.loads(sys.argv[1])
model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust).eval()
ids = torch.tensor([prompt])
options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0, "use_cache": True}
with torch.no_grad():
    save_file({"tokens": model.generate(ids, **options), "logits": model(ids).logits}, out)
"""
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def elsewhere(folder: Path, tmp_path: Path, *, trust: bool) -> dict[str, Tensor]:
    """Tokens and logits from a process that has transformers alone."""
    out = tmp_path / "found.safetensors"
    job = json.dumps([str(folder), PROMPT, trust, NEW, str(out)])
    environment = os.environ | {"HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", FRESH, job], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return load_file(out)


def here(model: transformers.PreTrainedModel) -> dict[str, Tensor]:
    ids = torch.tensor([PROMPT])
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        return {"tokens": model.generate(ids, use_cache=True, **options), "logits": model(ids).logits}


def narrow_gpt2() -> transformers.PreTrainedModel:
    sizes = {"n_embd": 16, "n_head": 2, "n_layer": 2, "vocab_size": 29, "n_positions": 256}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))


def narrow_llama() -> transformers.PreTrainedModel:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=29, max_position_embeddings=256)
    return transformers.LlamaForCausalLM(config)


@pytest.fixture(params=["GPT-2", "LLaMA", pytest.param("demo", marks=pytest.mark.slow)])
def original(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "demo":
        yield embedded.path()
        return
    model = narrow_gpt2() if request.param == "GPT-2" else narrow_llama()
    randomise(model).save_pretrained(tmp_path / "original")
    yield tmp_path / "original"


def test_slim_generates_the_same_tokens_with_and_without_deadweight(original: Path, tmp_path: Path) -> None:
    slim = tmp_path / "slim"
    deadweight.reduce(original, slim)
    wanted = here(transformers.AutoModelForCausalLM.from_pretrained(original).eval())
    assert wanted["tokens"].shape[1] == len(PROMPT) + NEW
    for result in (here(deadweight.load(slim)), elsewhere(slim, tmp_path, trust=True)):
        assert torch.equal(result["tokens"], wanted["tokens"])
        assert torch.allclose(
            result["logits"], wanted["logits"], rtol=0, atol=1e-4 * float(wanted["logits"].abs().max())
        )


def test_stock_loads_with_transformers_alone_and_gives_the_same_logits(original: Path, tmp_path: Path) -> None:
    stock = tmp_path / "stock"
    deadweight.reduce(original, stock, layout="stock")
    wanted = here(transformers.AutoModelForCausalLM.from_pretrained(original).eval())
    result = elsewhere(stock, tmp_path, trust=False)
    assert torch.equal(result["tokens"], wanted["tokens"])
    assert torch.allclose(result["logits"], wanted["logits"], rtol=0, atol=1e-4 * float(wanted["logits"].abs().max()))


def test_a_slim_folder_is_refused_by_transformers_alone(
    gpt2: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would initialise missing weights at random, and only warn."""
    deadweight.reduce(gpt2, tmp_path / "slim")
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.set_level(logging.WARNING, "transformers")  # a command that ran in this process may have silenced it
    for cls in (transformers.AutoModelForCausalLM, transformers.GPT2LMHeadModel):
        with pytest.raises(RuntimeError, match="mismatch"):
            cls.from_pretrained(tmp_path / "slim")
        assert "trust_remote_code=True" in caplog.text, "the report of what does not fit says how to load it"
        caplog.clear()
    _, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "slim", trust_remote_code=True, output_loading_info=True
    )
    assert not any(info.values()) and "trust_remote_code" not in caplog.text, (
        "with its own code nothing is missing, and nothing is too much"
    )
