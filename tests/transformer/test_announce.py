"""After `import deadweight` the Auto classes of transformers load what `deadweight train` wrote."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deadweight.transformer import TransformerConfig, TransformerForCausalLM

FIRST = 'import deadweight, sys\nassert not {"torch", "transformers"} & set(sys.modules)\n'
LOAD = "from transformers import AutoModelForCausalLM\n"
USE = "print(type(AutoModelForCausalLM.from_pretrained(sys.argv[1])).__module__)"


@pytest.mark.parametrize("start", [FIRST + LOAD, LOAD + "import deadweight, sys\n"], ids=["before", "after"])
def test_a_trained_model_loads_without_running_code_from_its_folder(start: str, tmp_path: Path) -> None:
    model = TransformerForCausalLM(TransformerConfig(d_model=8, n_layers=1, heads=2, vocab_size=11, context=6))
    model.save_pretrained(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", start + USE, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "deadweight.transformer.modeling", done.stderr
