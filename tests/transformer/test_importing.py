"""What is imported is the same function with the same gradients, and what cannot be is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import BertConfig, GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, RobertaConfig

from deadweight.errors import DeadweightError
from deadweight.source.families import FAMILIES, REQUIRED_SETTINGS
from deadweight.source.our_transformer import import_model, origins
from deadweight.source.randomise import randomise
from deadweight.transformer import TransformerForCausalLM, TransformerModel

EXACT = 1e-12  # relative, in float64: sums in another order leave about 1e-15
OTHER = 1e-6  # what another function is at least off by
LENGTH = 7
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 23}
LLAMA = SIZES | {"intermediate_size": 20, "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2}
ENCODER = SIZES | {"intermediate_size": 20, "max_position_embeddings": 16, "pad_token_id": 1}
GPT2 = SIZES | {"n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}

MODELS: dict[str, tuple[str, Any]] = {
    "gpt2": ("GPT2LMHeadModel", GPT2Config(**GPT2)),
    "gpt2, untied, exact gelu, unscaled": (
        "GPT2LMHeadModel",
        GPT2Config(**GPT2, tie_word_embeddings=False, activation_function="gelu", n_inner=14, scale_attn_weights=False),
    ),
    "gpt2, base": ("GPT2Model", GPT2Config(**GPT2, activation_function="relu")),
    "llama": ("LlamaForCausalLM", LlamaConfig(**LLAMA)),
    "llama, grouped, tied, all biases": (
        "LlamaForCausalLM",
        LlamaConfig(**LLAMA, num_key_value_heads=2, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    ),
    "llama, wide heads, another base": (
        "LlamaForCausalLM",
        LlamaConfig(**LLAMA, head_dim=6, rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
    ),
    "llama, base": ("LlamaModel", LlamaConfig(**LLAMA, num_key_value_heads=1)),
    "mistral": (
        "MistralForCausalLM",
        MistralConfig(**LLAMA, num_key_value_heads=2, head_dim=4, sliding_window=16),
    ),
    "qwen2": ("Qwen2ForCausalLM", Qwen2Config(**LLAMA, num_key_value_heads=2)),
    "qwen3": ("Qwen3ForCausalLM", Qwen3Config(**LLAMA, num_key_value_heads=2, head_dim=4)),
    "bert": ("BertModel", BertConfig(**ENCODER)),
    "bert, another gelu": ("BertModel", BertConfig(**ENCODER, hidden_act="gelu_new", type_vocab_size=1)),
    "roberta": ("RobertaModel", RobertaConfig(**ENCODER | {"max_position_embeddings": 18}, type_vocab_size=1)),
}


def made(name: str, **changes: Any) -> Any:
    architecture, config = MODELS[name]
    config = type(config).from_dict(config.to_dict() | changes)
    config._attn_implementation = "sdpa"  # eager attention takes its softmax in float32
    return randomise(getattr(transformers, architecture)(config).eval())


def exact(model: nn.Module) -> None:
    """Transformers' RMSNorms work in float32, whatever the model's precision: the same formula in its own."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = lambda x, m=module: m.weight * x * (x.square().mean(-1, True) + m.variance_epsilon).rsqrt()


def inputs_for(config: Any, padded: str | None = None) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs = {"input_ids": torch.randint(3, config.vocab_size, (3, LENGTH), generator=generator)}
    if getattr(config, "type_vocab_size", 0) > 1:
        inputs["token_type_ids"] = (torch.arange(LENGTH) > 3).long().expand(3, -1)
    if padded:
        counts = torch.tensor([[LENGTH], [LENGTH - 3], [2]])
        place = torch.arange(LENGTH) if padded == "right" else torch.arange(LENGTH).flip(0)
        inputs["attention_mask"] = (place < counts).long()
        if config.pad_token_id is not None:
            inputs["input_ids"] = inputs["input_ids"].where(inputs["attention_mask"].bool(), config.pad_token_id)
    return inputs


def output(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """What the model returns for the tokens that are not padding."""
    found = model(**inputs)[0]
    mask = inputs.get("attention_mask")
    return found if mask is None else found[mask.bool()]


def gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().norm() / b.detach().norm())


def pairs(ours: nn.Module, theirs: nn.Module) -> Callable[[], dict[str, tuple[Tensor, Tensor]]]:
    """Gradients by our names, beside theirs at the same places."""
    mine, other = (dict(m.named_parameters(remove_duplicate=False)) for m in (ours, theirs))
    return lambda: {n: (mine[n].grad, o.take(other[t].grad)) for n, (t, o) in origins(ours, theirs).items()}


@pytest.mark.parametrize("padded", [None, "right", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_are_those_of_the_original(name: str, padded: str | None) -> None:
    theirs = made(name)
    ours = import_model(theirs)
    exact(theirs)
    inputs = inputs_for(theirs.config, padded)
    if name == "roberta" and padded == "left":  # its own positions skip padding
        inputs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    a, b = output(ours, inputs), output(theirs, inputs | shifted(name, inputs))
    assert gap(a, b) < EXACT
    functional = torch.randn(b.shape, generator=torch.Generator().manual_seed(5), dtype=b.dtype)
    (a * functional).sum().backward()
    (b * functional).sum().backward()
    found = pairs(ours, theirs)()
    total = max(float(g.norm()) for _, g in found.values())
    for parameter, (mine, other) in found.items():
        # a gradient that is zero over the real numbers (key biases) is rounding: it is held against the largest
        assert float((mine - other).norm()) < EXACT * max(float(other.norm()), 1e-3 * total), parameter


def shifted(name: str, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """RoBERTa's own numbers for the same positions: two rows on."""
    return {"position_ids": inputs["position_ids"] + 2} if "position_ids" in inputs and name == "roberta" else {}


def test_every_family_is_imported_somewhere_above() -> None:
    assert {config.model_type for _, config in MODELS.values()} == set(FAMILIES)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gpt2", {"layer_norm_epsilon": 1e-2}),
        ("gpt2", {"activation_function": "gelu"}),
        ("gpt2", {"scale_attn_weights": False}),
        ("llama", {"rms_norm_eps": 1e-2}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}),
        ("qwen3", {"rms_norm_eps": 1e-2}),
        ("bert", {"layer_norm_eps": 1e-2}),
        ("bert", {"hidden_act": "gelu_new"}),
    ],
    ids=lambda x: x if isinstance(x, str) else next(iter(x)),
)
def test_another_setting_is_another_function(name: str, change: dict[str, Any]) -> None:
    right, wrong = import_model(made(name)), import_model(made(name, **change))
    inputs = inputs_for(right.config)
    assert gap(output(wrong, inputs), output(right, inputs)) > OTHER


def test_in_float32_the_original_is_met_as_it_is() -> None:
    theirs = made("qwen3").float()
    inputs = inputs_for(theirs.config)
    assert gap(output(import_model(theirs), inputs), output(theirs, inputs)) < 1e-5  # float32 rounds at 6e-8


def test_the_copy_shares_nothing_with_the_original() -> None:
    theirs = made("llama")
    ours, inputs = import_model(theirs), inputs_for(theirs.config)
    before = output(ours, inputs)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.zero_()
    torch.testing.assert_close(output(ours, inputs), before)


def test_tied_weights_stay_tied_and_untied_ones_apart() -> None:
    tied, untied = (import_model(made(n)) for n in ("gpt2", "gpt2, untied, exact gelu, unscaled"))
    assert tied.readout.weight is tied.transformer.tokens.weight
    assert untied.readout.weight is not untied.transformer.tokens.weight


@pytest.mark.parametrize("name", ["gpt2", "gpt2, base", "llama", "bert"])
def test_a_folder_is_imported_like_its_model(name: str, tmp_path: Path) -> None:
    theirs = made(name)
    theirs.save_pretrained(tmp_path)
    ours, inputs = import_model(tmp_path), inputs_for(theirs.config)
    assert type(ours) is (TransformerForCausalLM if "LM" in MODELS[name][0] else TransformerModel)
    assert next(ours.parameters()).dtype == torch.float64 and not ours.training
    torch.testing.assert_close(output(ours, inputs), output(import_model(theirs), inputs))


def test_the_folder_of_a_masked_language_model_gives_its_encoder(tmp_path: Path) -> None:
    theirs = randomise(transformers.BertForMaskedLM(MODELS["bert"][1]).eval())
    theirs.save_pretrained(tmp_path)
    ours, inputs = import_model(tmp_path), inputs_for(theirs.config)
    assert gap(output(ours, inputs), output(theirs.bert, inputs)) < EXACT


REFUSED = {
    "rope_type": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
    "partial_rotary_factor": (
        "llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    ),
    "sliding_window": ("mistral", {"sliding_window": 8}),
    "position_embedding_type": ("bert", {"position_embedding_type": "relative_key"}),
    "add_cross_attention": ("gpt2", {"add_cross_attention": True}),
    "is_decoder": ("bert", {"is_decoder": True}),
    "attn_logit_softcapping": ("llama", {"attn_logit_softcapping": 50.0}),
    "final_logit_softcapping": ("llama", {"final_logit_softcapping": 30.0}),
    "num_experts": ("llama", {"num_experts": 4}),
    "quantization_config": ("llama", {"quantization_config": {"bits": 4}}),
    "scale_attn_by_inverse_layer_idx": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
}


def test_every_limit_is_tried() -> None:
    assert set(REFUSED) == {limit.name for limit in REQUIRED_SETTINGS}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_transformer_cannot_be_is_refused(name: str) -> None:
    model, change = REFUSED[name]
    theirs = made(model)
    for key, value in change.items():
        setattr(theirs.config, key, value)
    with pytest.raises(
        DeadweightError, match=rf"found {name} = .*; expected .*; audit and reduce accept the model as it"
    ):
        import_model(theirs)


def test_a_window_as_long_as_the_context_and_one_that_no_layer_has_are_no_windows() -> None:
    theirs = made("qwen2")
    theirs.config.sliding_window = 4
    assert theirs.config.layer_types == ["full_attention"] * 2
    import_model(theirs)
    theirs.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(
        DeadweightError, match="found sliding_window = 4; expected none: a token does not attend to its"
    ):
        import_model(theirs)


def test_an_activation_of_another_kind_is_refused() -> None:
    theirs = made("bert")
    theirs.config.hidden_act = "silu"
    with pytest.raises(DeadweightError, match="found activation 'silu'; expected gelu or gelu_python or"):
        import_model(theirs)


def test_another_family_is_refused_with_those_that_are_known() -> None:
    theirs = transformers.OPTForCausalLM(
        transformers.OPTConfig(hidden_size=8, num_hidden_layers=1, ffn_dim=8, num_attention_heads=2, vocab_size=11)
    )
    with pytest.raises(DeadweightError, match="found a model of type opt; expected gpt2 or llama or"):
        import_model(theirs)


def test_a_head_of_another_kind_is_refused_with_what_to_import() -> None:
    theirs = transformers.GPT2ForSequenceClassification(MODELS["gpt2"][1])
    with pytest.raises(DeadweightError, match=r"found a GPT2ForSequenceClassification; .* import its base_model"):
        import_model(theirs)


def test_a_parameter_without_a_place_is_refused() -> None:
    theirs = made("llama")
    theirs.model.extra = nn.Linear(2, 2)
    with pytest.raises(DeadweightError, match=r"found the parameter model\.extra\.weight"):
        import_model(theirs)


def test_a_checkpoint_without_all_its_weights_is_refused(tmp_path: Path) -> None:
    theirs = made("llama, base")
    theirs.config.architectures = ["LlamaForCausalLM"]
    theirs.save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text().replace('"LlamaModel"', '"LlamaForCausalLM"')
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(DeadweightError, match=r"has no lm_head.weight; expected a complete checkpoint"):
        import_model(tmp_path)
