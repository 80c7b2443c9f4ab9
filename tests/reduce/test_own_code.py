"""A class that a checkpoint defines by its own code: what is written loads again, by the same code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import deadweight
from deadweight.errors import DeadweightError

CODE = """
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class SmallConfig(PretrainedConfig):
    model_type = "small_of_its_own"

    def __init__(self, width=8, vocab_size=13, **others):
        self.width, self.vocab_size = width, vocab_size
        super().__init__(**others)


class SmallForCausalLM(PreTrainedModel):
    config_class = SmallConfig

    def __init__(self, config):
        super().__init__(config)
        self.tokens, self.norm = nn.Embedding(13, config.width), nn.LayerNorm(config.width)
        self.up, self.down = nn.Linear(config.width, 12), nn.Linear(12, 13)
        self.post_init()

    def forward(self, input_ids, **others):
        return CausalLMOutput(logits=self.down(torch.relu(self.up(self.norm(self.tokens(input_ids))))))
"""
CONFIG = {
    "architectures": ["SmallForCausalLM"],
    "auto_map": {
        "AutoConfig": "modeling_small.SmallConfig",
        "AutoModelForCausalLM": "modeling_small.SmallForCausalLM",
    },
    "dtype": "float32",
    "model_type": "small_of_its_own",
    "width": 8,
}
SHAPES = {
    "tokens.weight": (13, 8),
    "norm.weight": (8,),
    "norm.bias": (8,),
    "up.weight": (12, 8),
    "up.bias": (12,),
    "down.weight": (13, 12),
    "down.bias": (13,),
}


@pytest.fixture
def original(tmp_path: Path) -> Path:
    (folder := tmp_path / "original").mkdir()
    (folder / "modeling_small.py").write_text(CODE)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("layout", ["slim", "stock"])
def test_what_was_written_loads_by_the_code_in_its_folder(original: Path, tmp_path: Path, layout: str) -> None:
    out = tmp_path / layout
    result = deadweight.reduce(original, out, layout=layout, trust_remote_code=True)
    assert result.saves > 0 and deadweight.verify(original, out, trust_remote_code=True).same
    auto, ids = transformers.AutoModelForCausalLM, torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        wanted = auto.from_pretrained(original, trust_remote_code=True)(ids).logits
        for model in (
            auto.from_pretrained(out, trust_remote_code=True),
            deadweight.load(out, trust_remote_code=True),
        ):
            assert torch.allclose(model(ids).logits, wanted, atol=1e-5)
    card = (out / "README.md").read_text()
    assert f'AutoModelForCausalLM.from_pretrained("{layout}", trust_remote_code=True)' in card
    assert "without running code" not in card


def test_a_table_with_fewer_rows_than_the_config_says_is_refused_in_one_line(original: Path, tmp_path: Path) -> None:
    tensors = load_file(original / "model.safetensors")
    save_file(tensors | {"tokens.weight": tensors["tokens.weight"][:5]}, original / "model.safetensors")
    code = original / "modeling_small.py"
    code.write_text(code.read_text().replace("nn.Embedding(13,", "nn.Embedding(5,"))
    with pytest.raises(DeadweightError, match="expected the number of rows as vocab_size"):
        deadweight.reduce(original, tmp_path / "out", trust_remote_code=True)


def test_a_slim_checkpoint_needs_the_code_in_the_folder(original: Path, tmp_path: Path) -> None:
    """auto_map may point to the code of another repository."""
    from deadweight.save.side_files import require_its_code

    cls = type("Other", (torch.nn.Module,), {"__module__": "transformers_modules.owner.repository.modeling_other"})
    with pytest.raises(DeadweightError, match=r"expected modeling_other\.py in it"):
        require_its_code(original, cls)
