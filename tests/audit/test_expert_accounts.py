"""Narrow clones of models with experts: what is measured is explained, to the last dimension."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

import deadweight
from deadweight.audit.result import Completeness
from deadweight.source.narrow_clone import narrow_config
from deadweight.source.narrow_sizes import Size

WORDS = 41  # a first layer of experts that sees single tokens needs more points than the narrow vocabulary has
FAMILIES = {  # the layers and the redundant dimensions of the narrow clone, as the Jacobian has them
    "DeepseekV3ForCausalLM": (2, 296),  # the first has no experts
    "GraniteMoeForCausalLM": (1, 136),
}


@pytest.mark.parametrize(
    "architecture", [pytest.param(a, marks=pytest.mark.slow if n > 1 else ()) for a, (n, _) in FAMILIES.items()]
)
def test_experts_are_explained_to_the_last_dimension(architecture: str, tmp_path: Path) -> None:
    layers, dimensions = FAMILIES[architecture]
    counted = account_of(architecture, layers, tmp_path)
    assert (counted.measured, counted.explained) == (dimensions, dimensions)


def test_units_behind_a_clamp_look_free_where_no_input_reaches_it(tmp_path: Path) -> None:
    """GPT-OSS multiplies a gate by 1 + clamp(up, ±7): without the clamp, up's bias could take a scale of 1 + up over.

    Random inputs of the clone stay below 7, so the Jacobian has one dimension more for each of 12 units of 3 experts.
    The proof sees the clamp, and is silent.
    """
    counted = account_of("GptOssForCausalLM", 1, tmp_path)
    assert (counted.measured, counted.explained) == (81 + 12 * 3, 81)


def account_of(architecture: str, layers: int, folder: Path) -> Completeness:
    config = narrow_config(getattr(transformers, architecture).config_class(), Size(8, vocabulary=WORDS))
    config.architectures, config.num_hidden_layers = [architecture], layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    config.save_pretrained(folder)
    counted = deadweight.audit(str(folder / "config.json"), complete=True).completeness
    assert counted is not None and not counted.unsound
    return counted
