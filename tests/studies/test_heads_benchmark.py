"""What the heads benchmark compares with is what the papers say, and its page is what its record says."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from deadweight.compress.budget import whole
from deadweight.compress.locate import Heads, locate
from deadweight.compress.run import opened
from deadweight.compress.streaming import gathered
from deadweight.compress.truncate import Kept, cut
from deadweight.source.model import Source

ROOT = Path(__file__).parents[2]
CLOSE = 1e-4  # float32 weights, and JITTER in every moment
NAMES = ("plain", "calibrated", "norms")


@pytest.fixture(scope="module")
def bench(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("heads")


@pytest.fixture(scope="module")
def rivals(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("heads_baselines")


@pytest.fixture(scope="module")
def llama() -> tuple[Source, tuple[Heads, ...]]:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=64,
        initializer_range=0.2,  # so that heads matter
    )
    source, _ = opened(LlamaForCausalLM(config).eval(), "cpu")
    return source, locate(source)


@pytest.fixture(scope="module")
def bert() -> tuple[Source, tuple[Heads, ...]]:
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=64,
        max_position_embeddings=64,
    )
    source, _ = opened(BertModel(config, add_pooling_layer=False).eval(), "cpu")
    return source, locate(source)


@pytest.fixture(scope="module")
def batches() -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    return [{"input_ids": torch.randint(0, 64, (2, 40))} for _ in range(2)]


@torch.no_grad()
def states(model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found = model(**batch)
    return found.logits if hasattr(found, "logits") else found.last_hidden_state


def space_of(rivals: ModuleType, name: str, model: torch.nn.Module, heads: Heads, seen: object):
    return getattr(rivals, name)(model, heads, *([seen] if name == "calibrated" else []))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_a_turned_head_of_full_size_is_the_same_function(
    request: pytest.FixtureRequest, rivals: ModuleType, batches: list[dict[str, Tensor]], family: str, name: str
) -> None:
    """All but nothing kept is not skipped by the cut: values lose a dimension that was made zero beforehand."""
    source, attentions = request.getfixturevalue(family)
    model = copy.deepcopy(source.module)
    for heads in attentions:
        with torch.no_grad():
            value = model.get_submodule(heads.value.module)
            value.weight[heads.value.places[:, 3]] = 0.0
            if value.bias is not None:
                value.bias[heads.value.places[:, 3]] = 0.0
    seen = rivals.statistics(model, attentions, batches)
    spaces = [space_of(rivals, name, model, h, seen) for h in attentions]
    kept = {s.heads.path: Kept((s.heads.d_v - 1,) * s.heads.key_heads, whole(s).still, whole(s).planes) for s in spaces}
    small = cut(model, spaces, kept, bias=False).module
    before, after = states(model, batches[0]), states(small, batches[0])
    assert float((before - after).norm() / before.norm()) < CLOSE


def test_plain_svd_truncates_the_singular_values_of_value_times_output(
    rivals: ModuleType, llama: tuple[Source, tuple[Heads, ...]]
) -> None:
    source, attentions = llama
    heads, rank = attentions[0], 5
    space = rivals.plain(source.module, heads)
    pair = torch.cat(list(rivals.output_weights(source.module, heads)[: heads.groups]))
    value = rivals.weights(source.module, heads.value)[0]
    found = torch.linalg.svdvals(pair @ value)
    back = space.values[0].back(rank)
    assert torch.allclose(back[0], back[1])
    left = pair @ (torch.eye(heads.d_v).double() - back[0] @ space.values[0].basis[:rank]) @ value
    assert float(left.norm()) == pytest.approx(float(found[rank:].norm()), rel=CLOSE)


def test_plain_svd_of_queries_and_keys_truncates_the_logits_matrix(
    rivals: ModuleType, bert: tuple[Source, tuple[Heads, ...]]
) -> None:
    source, attentions = bert
    heads, rank = attentions[0], 3
    still = rivals.plain(source.module, heads).still[1]
    q, k = (rivals.weights(source.module, side)[1] for side in (heads.query, heads.key))
    left = q.T @ (torch.eye(heads.d_qk).double() - still.back(rank)[0] @ still.basis[:rank]) @ k
    assert float(left.norm()) == pytest.approx(float(torch.linalg.svdvals(q.T @ k)[rank:].norm()), rel=CLOSE)


@pytest.mark.parametrize("rank", [1, 4, 8])
def test_whitened_svd_is_the_best_matrix_of_its_rank_for_its_inputs(rivals: ModuleType, rank: int) -> None:
    torch.manual_seed(2)
    weight, mix = torch.randn(8, 12).double(), torch.randn(12, 12).double()
    moment = mix @ mix.T

    def error(other: Tensor) -> float:
        return float(((weight - other) @ moment * (weight - other)).sum())

    best = rivals.whitened(weight, moment, rank)
    assert int(torch.linalg.matrix_rank(best)) == rank
    for _ in range(200):  # random spaces of this rank, the best that each allows
        basis = torch.linalg.qr(torch.randn(8, rank).double()).Q
        assert error(best) <= error(basis @ basis.T @ weight) + 1e-4 * error(0 * weight)  # JITTER in the moment
    nearby = best + 1e-3 * torch.randn_like(best) @ torch.linalg.pinv(best) @ best
    assert rank == 8 or error(best) < error(nearby)


def test_whitened_matrices_of_full_rank_are_the_same_function(
    rivals: ModuleType, llama: tuple[Source, tuple[Heads, ...]], batches: list[dict[str, Tensor]]
) -> None:
    source, attentions = llama
    seen = rivals.statistics(source.module, attentions, batches)
    made = rivals.whitened_matrices(source.module, attentions, seen, 1.0, "kv")
    before, after = states(source.module, batches[0]), states(made.module, batches[0])
    assert made.share == 1.0
    assert float((before - after).norm() / before.norm()) < CLOSE
    half = rivals.whitened_matrices(source.module, attentions, seen, 0.5, "kv")
    assert half.share == 0.5
    ranks = [torch.linalg.matrix_rank(half.module.get_submodule(h.key.module).weight) for h in attentions]
    assert [int(r) for r in ranks] == [8, 8]


def test_importance_is_the_gradient_of_a_mask(
    rivals: ModuleType, llama: tuple[Source, tuple[Heads, ...]], batches: list[dict[str, Tensor]]
) -> None:
    """Against a difference of losses with the output projection's columns of one key head a little larger."""
    source, attentions = llama
    one = [{"input_ids": batches[0]["input_ids"][:1]}]
    found = rivals.importance(source.module, attentions, one)
    heads = attentions[1]
    slopes = []
    for g in range(heads.key_heads):
        losses = []
        for scale in (1 + 1e-3, 1 - 1e-3):
            model = gathered(copy.deepcopy(source.module)).double()
            columns = slice(g * heads.groups * heads.d_v, (g + 1) * heads.groups * heads.d_v)
            with torch.no_grad():
                model.get_submodule(heads.output).weight[:, columns] *= scale
                logits = model(**one[0]).logits[0, :-1]  # the model's own loss is in float32
                losses.append(float(cross_entropy(logits, one[0]["input_ids"][0, 1:])))
        slopes.append(abs(losses[0] - losses[1]))
    expected = torch.tensor(slopes).double()
    assert torch.allclose(found[heads.path], expected / expected.norm(), atol=1e-3)  # gradients in float32


def test_whole_heads_go_least_important_first_and_are_counted(
    rivals: ModuleType, llama: tuple[Source, tuple[Heads, ...]]
) -> None:
    source, attentions = llama
    worth = {h.path: torch.tensor([0.2 + i, 0.1]) for i, h in enumerate(attentions)}
    kept = rivals.heads_kept(attentions, worth, 0.5)
    assert [kept[h.path].values for h in attentions] == [(8, 0), (8, 0)]
    spaces = [rivals.norms(source.module, h) for h in attentions]
    made = rivals.smaller(source.module, spaces, kept, "kv")
    assert made.share == 0.5
    rows = attentions[0].value.places[1]
    assert not made.module.get_submodule(attentions[0].value.module).weight[rows].any()


@pytest.mark.parametrize("share", [0.9, 0.75, 0.5])
def test_the_same_everywhere_uses_the_budget_up(
    rivals: ModuleType, llama: tuple[Source, tuple[Heads, ...]], share: float
) -> None:
    source, attentions = llama
    made = rivals.same_ranks(source.module, attentions, lambda h: rivals.norms(source.module, h), share, "kv")
    assert share - 1 / 16 < made.share <= share  # a head has 8 + 8 numbers


def test_the_page_is_what_the_record_says(bench: ModuleType) -> None:
    record = json.loads((ROOT / "benchmarks" / "results" / "heads.json").read_text(encoding="utf-8"))
    assert bench.page(record) == (ROOT / "docs" / "heads.md").read_text(encoding="utf-8")
