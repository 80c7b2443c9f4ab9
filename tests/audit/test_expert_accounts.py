"""Narrow clones of models with experts: what is measured is explained, to the last dimension."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

import deadweight
from deadweight.source.narrow_clone import narrow_config
from deadweight.source.narrow_sizes import Size

WORDS = 41  # a first layer of experts that sees single tokens needs more points than the narrow vocabulary has
FAMILIES = {  # the redundant dimensions of the narrow clone, as the Jacobian has them
    "GptOssForCausalLM": 126,
    "DeepseekV3ForCausalLM": 296,
    "GraniteMoeForCausalLM": 236,
}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_experts_are_explained_to_the_last_dimension(architecture: str, tmp_path: Path) -> None:
    config = narrow_config(getattr(transformers, architecture).config_class(), Size(8, vocabulary=WORDS))
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    counted = deadweight.audit(str(tmp_path / "config.json"), complete=True).completeness
    assert counted is not None and not counted.unsound
    assert (counted.measured, counted.explained) == (FAMILIES[architecture],) * 2
