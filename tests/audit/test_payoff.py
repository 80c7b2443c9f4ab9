"""What a finding saves is what `reduce` can remove, in the precision of the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import deadweight
from deadweight.audit.result import Audit, Payoff, sum_payoffs

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "tie_word_embeddings": False,
}


def audit_config(folder: Path, **changes: str) -> Audit:
    (folder / "config.json").write_text(json.dumps(LLAMA | changes), encoding="utf-8")
    return deadweight.audit(str(folder / "config.json"))


@pytest.mark.parametrize(("named", "size"), [("bfloat16", 2), ("float32", 4), ("float64", 8)])
def test_bytes_are_those_of_the_precision_that_the_config_names(tmp_path: Path, named: str, size: int) -> None:
    saved = sum_payoffs(audit_config(tmp_path, dtype=named).findings)
    assert saved.parameters > 0 and saved.bytes == size * saved.parameters


def test_a_config_without_a_precision_or_with_nonsense_counts_as_float32(tmp_path: Path) -> None:
    saved = sum_payoffs(audit_config(tmp_path).findings)
    assert saved.bytes == 4 * saved.parameters
    assert sum_payoffs(audit_config(tmp_path, dtype="int8").findings) == saved


def test_a_gauge_that_reduce_leaves_alone_saves_nothing(tmp_path: Path) -> None:
    findings = audit_config(tmp_path).findings
    kept = [f for f in findings if f.code in ("DW009", "DW011", "DW012")]  # rotary pairs, scales of units, the stream
    assert {f.code for f in kept} == {"DW009", "DW011", "DW012"}
    assert all(f.dof and f.payoff == Payoff() for f in kept)
    values = [f for f in findings if f.code == "DW010"]
    assert values and all(f.payoff.parameters == f.dof for f in values)


def test_the_payoffs_of_the_demo_add_up_to_what_reduce_removes() -> None:
    assert sum_payoffs(deadweight.audit("demo").findings).parameters == 112_392
