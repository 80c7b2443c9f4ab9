"""Every family, reduced as a user would: the same function in float64 and in float32, and loadable both ways."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

import deadweight

from .conftest import randomise

FAMILIES = [
    "BertForMaskedLM",
    "BloomForCausalLM",
    "CLIPModel",
    "FalconForCausalLM",
    "GPTJForCausalLM",
    "GPTNeoXForCausalLM",
    "LlamaForCausalLM",
    "OPTForCausalLM",
    "PhiForCausalLM",
    "Qwen3ForCausalLM",
    "T5ForConditionalGeneration",
    "ViTModel",
    "WhisperForConditionalGeneration",
]
EXACT = 1e-12


@pytest.mark.parametrize(
    "architecture", [a if a == "LlamaForCausalLM" else pytest.param(a, marks=pytest.mark.slow) for a in FAMILIES]
)
def test_a_family_reduces_to_the_same_function(architecture: str, folder_of: Callable, tmp_path: Path) -> None:
    source = folder_of(architecture)
    result = deadweight.reduce(source, tmp_path / "slim")
    assert result.verification is not None
    for error in result.verification.errors:
        assert error.float64 <= EXACT and error.noise is not None and error.noise.growth <= 3
    saved = result.parameters_before - result.parameters_after
    assert saved == sum(s.saves for s in result.steps) > 0
    assert deadweight.verify(source, tmp_path / "slim").same


@pytest.mark.parametrize(
    "architecture",
    [
        "LlamaForCausalLM",
        pytest.param("BertForMaskedLM", marks=pytest.mark.slow),
        pytest.param("GPTNeoXForCausalLM", marks=pytest.mark.slow),
    ],
)
def test_a_family_in_stock_form_keeps_its_shapes(architecture: str, folder_of: Callable, tmp_path: Path) -> None:
    source = folder_of(architecture)
    deadweight.reduce(source, tmp_path / "stock", layout="stock")
    original = getattr(transformers, architecture).from_pretrained(source)
    stock = getattr(transformers, architecture).from_pretrained(tmp_path / "stock")
    assert {n: p.shape for n, p in stock.named_parameters()} == {n: p.shape for n, p in original.named_parameters()}


def test_all_that_laws_promise_of_gpt2_is_gone_from_the_file(gpt2: Path, tmp_path: Path) -> None:
    result = deadweight.reduce(gpt2, tmp_path / "slim")
    rows = 32 - 5  # the reference counts have five positions, this model 32
    assert result.parameters_before - result.parameters_after == 345 + rows
    from safetensors.torch import load_file

    stored = load_file(tmp_path / "slim" / "model.safetensors")
    assert sum(t.numel() for t in stored.values() if t.is_floating_point()) == result.parameters_after


def test_a_slim_model_generates_the_same_tokens_with_its_cache(gpt2: Path, tmp_path: Path) -> None:
    deadweight.reduce(gpt2, tmp_path / "slim")
    original = transformers.AutoModelForCausalLM.from_pretrained(gpt2).eval()
    remote = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "slim", trust_remote_code=True).eval()
    ours = deadweight.load(tmp_path / "slim")
    start = torch.tensor([[3, 1, 4]])
    options = {"max_new_tokens": 28, "min_new_tokens": 28, "do_sample": False, "pad_token_id": 0}
    wanted = original.generate(start, **options)
    for model in (remote, ours):
        assert torch.equal(model.generate(start, **options), wanted)
        assert torch.equal(model.generate(start, use_cache=False, **options), wanted)


def test_a_slim_model_survives_save_and_load_and_other_precisions(gpt2: Path, tmp_path: Path) -> None:
    deadweight.reduce(gpt2, tmp_path / "slim")
    model = deadweight.load(tmp_path / "slim")
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    model.save_pretrained(tmp_path / "again")
    torch.testing.assert_close(deadweight.load(tmp_path / "again")(ids).logits, model(ids).logits)
    half = deadweight.load(tmp_path / "slim", dtype=torch.bfloat16)
    assert half(ids).logits.dtype == torch.bfloat16
    original = transformers.AutoModelForCausalLM.from_pretrained(gpt2, dtype=torch.bfloat16).eval()
    exact = transformers.AutoModelForCausalLM.from_pretrained(gpt2).double().eval()(ids).logits
    noise = (original(ids).logits.double() - exact).norm()
    assert (half(ids).logits.double() - exact).norm() < 3 * noise


def test_an_image_model_in_bfloat16_gets_images_in_bfloat16(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=8, num_labels=3)
    randomise(transformers.ViTForImageClassification(config)).bfloat16().save_pretrained(tmp_path / "vit")
    result = deadweight.reduce(tmp_path / "vit", tmp_path / "slim")
    assert result.parameters_after < result.parameters_before
    assert deadweight.verify(tmp_path / "vit", tmp_path / "slim").same


def layout_model(folder: Path) -> transformers.PreTrainedModel:
    """A model that reads text, and pictures where it is given any: a second norm reads both."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    boxes = {"coordinate_size": 3, "shape_size": 2, "max_2d_position_embeddings": 64, "max_position_embeddings": 40}
    config = transformers.LayoutLMv3Config(**sizes, **boxes, vocab_size=31, input_size=16, patch_size=4, num_labels=3)
    model = randomise(transformers.LayoutLMv3ForTokenClassification(config)).eval()
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def test_what_holds_for_text_alone_is_not_done_if_it_fails_with_a_picture(tmp_path: Path) -> None:
    """Without a picture attention reads the norm of the embeddings; with one, a second norm is in between."""
    model = layout_model(tmp_path / "source")
    result = deadweight.reduce(tmp_path / "source", tmp_path / "slim")
    assert result.verification is not None and "with pixel_values" in result.verification.inputs
    assert "DW007" in {s.code for s in result.skipped} and result.parameters_after < result.parameters_before
    small, generator = deadweight.load(tmp_path / "slim"), torch.Generator().manual_seed(1)
    given = {
        "input_ids": torch.randint(3, 31, (2, 7), generator=generator),
        "bbox": torch.tensor([1, 2, 5, 9]).expand(2, 7, 4),
    }
    for more in ({}, {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}):
        wanted = model(**given, **more).logits
        assert torch.allclose(small(**given, **more).logits, wanted, atol=1e-4 * float(wanted.abs().max()))


def test_a_slim_model_compiles(gpt2: Path, tmp_path: Path) -> None:
    deadweight.reduce(gpt2, tmp_path / "slim")
    model, ids = deadweight.load(tmp_path / "slim"), torch.tensor([[3, 1, 4, 1, 5]])
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert torch.allclose(compiled(ids, use_cache=False).logits, model(ids).logits, atol=1e-5)


def test_reducing_stock_twice_is_reducing_once(gpt2: Path, tmp_path: Path) -> None:
    deadweight.reduce(gpt2, tmp_path / "once", layout="stock")
    deadweight.reduce(tmp_path / "once", tmp_path / "twice", layout="stock")
    once, twice = ((tmp_path / n / "model.safetensors").read_bytes() for n in ("once", "twice"))
    assert once == twice


def test_a_slim_model_is_not_reduced_again(gpt2: Path, tmp_path: Path) -> None:
    deadweight.reduce(gpt2, tmp_path / "slim")
    with pytest.raises(deadweight.DeadweightError, match="slim already"):
        deadweight.reduce(tmp_path / "slim", tmp_path / "again")


def test_a_plan_needs_no_weights(gpt2: Path) -> None:
    plan = deadweight.reduce(gpt2 / "config.json", dry_run=True)
    assert plan.parameters_before - plan.parameters_after == 345 + 27 and plan.out is None
