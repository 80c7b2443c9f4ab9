"""Model types whose default configs once ended an audit with a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import deadweight

CODES = ("DW002", "DW009", "DW010")
SMALL = {"vocab_size": 40, "pad_token_id": 1}
CONFIGS = {
    "xlm": SMALL | {"emb_dim": 16, "n_layers": 2, "n_heads": 2},  # joins keys with an empty cache of another rank
    "xlm-roberta-xl": SMALL  # its positions name the device, and the model has no values
    | {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24},
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_config_is_audited_and_its_heads_have_free_bases(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": kind} | CONFIGS[kind]), encoding="utf-8")
    found = {code: sum(f.dof for f in deadweight.audit(str(file)).findings if f.code == code) for code in CODES}
    assert found == {"DW002": 2 * 16, "DW009": 2 * 2 * 8 * 8, "DW010": 2 * 2 * 8 * 8}
