"""Our own transformer is audited, cloned, reduced, verified and loaded like any other model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import deadweight
from deadweight.cli import app
from deadweight.source.model import open_model
from deadweight.source.narrow_clone import narrow, narrow_config
from deadweight.source.narrow_sizes import Size
from deadweight.source.randomise import randomise
from deadweight.transformer import TransformerConfig, TransformerForCausalLM, TransformerForMaskedLM, TransformerModel

EXACT = 1e-12  # relative, in float64
SMALL = {"vocab_size": 11, "context": 12, "d_model": 8, "n_layers": 2, "heads": 2, "hidden": 12}
BIASES = ["query", "key", "value", "output", "up", "down", "norm"]
EVERY = [*BIASES, "gate", "readout"]
IDS = torch.tensor([[3, 1, 4, 1, 5]])


def saved(folder: Path, cls: Any = TransformerForCausalLM, **changes: Any) -> Path:
    randomise(cls(TransformerConfig(**SMALL | changes)).eval()).float().save_pretrained(folder)
    return folder


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).detach().norm() / b.detach().norm())


def with_evil_code(folder: Path) -> Path:
    """Whoever gets a folder may find any code in it."""
    for file in folder.glob("*.py"):
        file.write_text("raise SystemExit('code of the folder was run')")
    return folder


UNTIED = {"tie_word_embeddings": False}
LLAMA = UNTIED | {"norm": "rms", "norm_eps": 0.0, "positions": "rotary", "activation": "swiglu"}
COUNTED: dict[str, tuple[dict[str, Any], int]] = {  # the first four are the reference counts of GPT-2 and LLaMA
    "gpt2, tied": ({"biases": BIASES}, 345),
    "gpt2, untied": (UNTIED | {"biases": BIASES}, 400),
    "llama": (LLAMA, 173),
    "llama, one key head": (LLAMA | {"key_heads": 1}, 133),
    "a shape for each layer": (UNTIED | {"heads": [1, 2], "d_qk": [4, 2], "d_v": [2, 6], "biases": EVERY}, 353),
    "identity query, key and value": (
        UNTIED | {"query": "identity", "key": "identity", "value": "identity", "biases": EVERY},
        150,
    ),
    "no skips": (UNTIED | {"attention_skip": False, "mlp_skip": False, "biases": EVERY}, 495),
    "no norm, both skips": (UNTIED | {"norm": "none"}, 200),
    "no norm, a skip around attention": (UNTIED | {"norm": "none", "mlp_skip": False, "biases": EVERY}, 400),
    "no norm, shared layers": (UNTIED | {"norm": "none", "shared_layers": True}, 136),
    "norms without gains": (UNTIED | {"norm_gain": False, "positions": "none", "biases": EVERY}, 319),
}
QUICK = ("no norm, both skips", "norms without gains")  # the others are marked slow
ALL_IDS = torch.tensor([[0, 10, 3, 7, 5]])  # others are drawn between the least and the greatest of them


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in COUNTED])
def test_the_laws_explain_every_redundant_dimension(name: str) -> None:
    changes, count = COUNTED[name]
    model = TransformerForCausalLM(TransformerConfig(**SMALL | {"context": 5} | changes))
    found = deadweight.audit(model, (ALL_IDS,), complete=True)
    assert found.completeness is not None and found.untraced is None and not found.completeness.unsound
    assert (found.completeness.measured, found.completeness.explained) == (count, count)


def test_a_folder_is_audited_reduced_and_verified_without_running_its_code(tmp_path: Path) -> None:
    folder = with_evil_code(saved(tmp_path / "model", biases=BIASES, n_layers=1))
    run = lambda *words: CliRunner().invoke(app, [str(w) for w in words])  # noqa: E731
    told = run("audit", folder, "--json", tmp_path / "audit.json")
    assert told.exit_code == 0, told.output
    assert json.loads((tmp_path / "audit.json").read_text())["redundant"] == 183  # with the scale of the tied table
    made = run("reduce", folder, tmp_path / "slim")
    assert made.exit_code == 0, made.output
    same = run("verify", folder, tmp_path / "slim")
    assert same.exit_code == 0, same.output
    stored = load_file(tmp_path / "slim" / "model.safetensors").values()
    assert sum(t.numel() for t in stored if t.is_floating_point()) == 732 - 182
    assert "code of the folder" not in (tmp_path / "slim" / "modeling.py").read_text()


def test_trusting_the_folder_does_not_make_its_code_run_either(tmp_path: Path) -> None:
    folder = with_evil_code(saved(tmp_path / "model"))
    assert type(open_model(folder, weights=True, trust_remote_code=True).module) is TransformerForCausalLM


@pytest.mark.parametrize(
    ("cls", "changes"),
    [
        (TransformerForCausalLM, {}),
        (TransformerForMaskedLM, {"causal": False, "token_types": 2}),
        (TransformerModel, {"causal": False}),
        (TransformerModel, {}),
    ],
)
def test_a_folder_opens_as_the_class_that_was_saved(cls: Any, changes: dict[str, Any], tmp_path: Path) -> None:
    source = open_model(saved(tmp_path, cls, **changes))
    assert type(source.module) is cls and not source.has_weights
    assert ("token_type_ids" in source.kwargs) == ("token_types" in changes)


def test_a_bare_config_opens_as_a_decoder_or_an_encoder(tmp_path: Path) -> None:
    for causal, cls in ((True, TransformerForCausalLM), (False, TransformerForMaskedLM)):
        TransformerConfig(**SMALL, causal=causal).save_pretrained(tmp_path)
        assert type(open_model(tmp_path / "config.json").module) is cls


def test_a_slim_model_loads_here_and_again_and_generates_the_same(tmp_path: Path) -> None:
    changes = {"heads": [1, 2], "d_qk": [4, 2], "d_v": [2, 4], "positions": "rotary", "biases": BIASES}
    folder = saved(tmp_path / "model", **changes)
    found = deadweight.reduce(folder, tmp_path / "slim")
    assert found.parameters_after < found.parameters_before
    original, slim = deadweight.load(folder), deadweight.load(tmp_path / "slim")
    slim.save_pretrained(tmp_path / "again")
    again = deadweight.load(tmp_path / "again")
    options = {"max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False, "pad_token_id": 0}
    wanted = original.generate(IDS, **options)
    for model in (slim, again):
        assert torch.equal(model.generate(IDS, **options), wanted)
        assert torch.equal(model.generate(IDS, use_cache=False, **options), wanted)


def test_a_live_model_is_reduced_and_written(tmp_path: Path) -> None:
    model = randomise(TransformerForMaskedLM(TransformerConfig(**SMALL, causal=False, biases=BIASES)).eval())
    found = deadweight.reduce(model, tmp_path / "slim", inputs={"input_ids": IDS})
    assert relative(deadweight.load(tmp_path / "slim")(IDS).logits, model(IDS).logits) < EXACT
    assert found.parameters_before - found.parameters_after > 300


CLONED: dict[str, dict[str, Any]] = {
    "one shape": {"n_layers": 12, "heads": 12, "d_model": 768},
    "grouped, rotary": {"heads": 8, "key_heads": 2, "d_model": 256, "positions": "rotary", "activation": "swiglu"},
    "a shape for each layer, one head size": {
        "n_layers": 4,
        "heads": [1, 2, 4, 8],
        "d_model": 64,
        "d_qk": 8,
        "query": ["full", "full", "full", "identity"],
        "biases": ["query", "key", "value", "norm"],
    },
    "grouped keys that are the identity": {"heads": 8, "key_heads": 2, "d_qk": 32, "d_model": 64, "key": "identity"},
    "identities": {"n_layers": 3, "heads": [1, 2, 4], "d_model": 64, "query": "identity", "value": "identity"},
    "wide and narrow values": {"n_layers": 3, "heads": 4, "d_model": 64, "d_v": [16, 8, 32]},
    "shared layers": {"n_layers": 6, "heads": 4, "d_model": 64, "shared_layers": True},
}


@pytest.mark.parametrize("name", CLONED)
def test_a_narrow_clone_keeps_the_kinds_of_layers(name: str) -> None:
    wide = TransformerConfig(**CLONED[name])
    clone = narrow_config(wide, Size(8))
    assert clone.d_model == 8 and clone.context == 5 and clone.biases == wide.biases
    kinds = {shape_kind(s, wide.d_model) for s in wide.layers}
    assert {shape_kind(s, 8) for s in clone.layers} == kinds


def shape_kind(shape: Any, width: int) -> tuple[Any, ...]:
    """Whether heads together are narrower than the stream, as wide, or wider; grouped or not; what is the identity."""
    compared = [(size * shape.heads > width) - (size * shape.heads < width) for size in (shape.d_qk, shape.d_v)]
    return *compared, shape.key_heads < shape.heads, shape.query, shape.key, shape.value


def test_the_clone_of_a_wide_model_runs() -> None:
    config = TransformerConfig(**CLONED["a shape for each layer, one head size"])
    with torch.device("meta"):
        model = TransformerForCausalLM(config)
    clone = narrow(open_model(model))
    assert sum(p.numel() for p in clone.module.parameters()) < 20_000
    assert torch.isfinite(clone.module(*clone.args, **clone.kwargs).logits).all()


def test_a_list_of_as_many_biases_as_layers_is_no_list_of_layers() -> None:
    config = TransformerConfig(n_layers=3, biases=["query", "key", "value"], heads=[2, 4, 2], d_model=64)
    assert narrow_config(config, Size(8)).biases == ["query", "key", "value"]


NORMLESS = {"norm": "none", "tie_word_embeddings": False, "activation": "gelu", "positions": "rotary", "heads": 1}
BY_TABLE = {"positions": "learned"}  # without rotary positions, keys have a block to give
WHOLE: dict[str, tuple[dict[str, Any], int]] = {  # and how many matrices become the identity
    "one layer, both skips": ({"n_layers": 1}, 1),
    "a skip around attention only": ({"mlp_skip": False, "heads": 2, "positions": "learned", "biases": EVERY}, 2),
    "shared layers, both skips": ({"shared_layers": True, "n_layers": 2}, 1),
}


def check_whole(changes: dict[str, Any], count: int) -> deadweight.Reduction:
    """Everything that all laws take out together, with so many whole projections among it."""
    model = randomise(TransformerForCausalLM(TransformerConfig(**SMALL | NORMLESS | changes)).eval())
    found = deadweight.reduce(model, inputs={"input_ids": IDS})
    assert [s.saves for s in found.steps if s.code == "DW015"] == [64] * count
    assert "DW010" in {s.code for s in found.steps}
    assert found.module is not None and relative(found.module(IDS).logits, model(IDS).logits) < EXACT
    assert sum(p.numel() for p in found.module.parameters()) == found.parameters_after
    return found


@pytest.mark.parametrize("name", WHOLE)
def test_without_norms_a_whole_projection_becomes_the_identity(name: str) -> None:
    check_whole(*WHOLE[name])


@pytest.mark.slow
def test_without_norms_every_one_of_many_layers_loses_a_whole_projection() -> None:
    check_whole({"mlp_skip": False, "n_layers": 5, "hidden": 3}, 5)


def test_a_query_that_is_the_identity_is_not_turned_for_its_keys_and_the_plan_foresees_it() -> None:
    model = randomise(
        TransformerForCausalLM(TransformerConfig(**SMALL | NORMLESS | {"n_layers": 1, **BY_TABLE})).eval()
    )
    options = {"inputs": {"input_ids": IDS}, "select": ["DW009", "DW015"]}
    found, planned = deadweight.reduce(model, **options), deadweight.reduce(model, **options, dry_run=True)
    assert [s.code for s in found.steps] == [s.code for s in planned.steps] == ["DW015"]
    why = "transformer.layers.0.attention.query.weight is already the identity, and would not stay so"
    assert why in [s.why for s in found.skipped if s.code == "DW009"]


KEPT: dict[str, tuple[dict[str, Any], str]] = {
    "a norm": ({"n_layers": 1, "norm": "rms"}, "a norm reads the stream, which rotations alone pass; train with"),
    "a norm, a skip around attention only": ({"mlp_skip": False, "norm": "layer"}, "a norm reads the stream"),
    "a tied readout": (
        {"n_layers": 1, "tie_word_embeddings": True},
        "the stream has no other basis: transformer.tokens.weight is read as a weight too (tied); train with",
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_with_a_norm_or_a_tied_readout_every_projection_stays_and_it_is_said_why(name: str) -> None:
    changes, why = KEPT[name]
    model = randomise(TransformerForCausalLM(TransformerConfig(**SMALL | NORMLESS | changes)).eval())
    plan = deadweight.reduce(model, inputs={"input_ids": IDS}, select=["DW015"], dry_run=True)
    assert not plan.steps and plan.parameters_after == plan.parameters_before
    assert plan.skipped and all(s.code == "DW015" and s.why.startswith(why) for s in plan.skipped)


def test_unshared_layers_with_both_skips_have_one_turn_among_them() -> None:
    model = randomise(TransformerForCausalLM(TransformerConfig(**SMALL | NORMLESS)).eval())
    found = deadweight.reduce(model, inputs={"input_ids": IDS}, select=["whole-projection"])
    assert [(s.parameter, s.saves) for s in found.steps] == [("transformer.layers.0.attention.query.weight", 64)]
    kept = {s.parameter: s.why for s in found.skipped}
    why = kept["transformer.layers.1.attention.query.weight"]
    assert why.startswith("skips make one stream of all that it reads, and transformer.layers.0.attention.query.weight")
    assert found.module is not None and relative(found.module(IDS).logits, model(IDS).logits) < EXACT


def test_refusals_of_whole_projections_are_reported_only_if_selected() -> None:
    model = randomise(TransformerForCausalLM(TransformerConfig(**SMALL | {"n_layers": 1})).eval())
    plan = deadweight.reduce(model, inputs={"input_ids": IDS}, dry_run=True)
    assert not [s for s in plan.skipped if s.code == "DW015"]
