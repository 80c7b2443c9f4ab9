"""Example inputs in writing, and those made from the first layers where none are given."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import deadweight
from deadweight.errors import DeadweightError
from deadweight.source.model import open_model


class Tokens(nn.Module):
    """Tokens with positions from a smaller table; a mask may be given."""

    def __init__(self, rows: int = 50) -> None:
        super().__init__()
        self.embed, self.types, self.read = nn.Embedding(rows, 8), nn.Embedding(3, 8), nn.Linear(8, 4)

    def forward(self, ids: Tensor, mask: Tensor | None = None, types: Tensor | None = None) -> Tensor:
        x = self.embed(ids) + self.types(torch.zeros_like(ids) if types is None else types)
        return self.read(x if mask is None else x * mask[..., None])


def test_a_shape_and_a_kind_make_a_tensor_that_the_first_table_can_look_up() -> None:
    (ids,) = open_model(Tokens(), inputs="2x7:int").args
    assert ids.shape == (2, 7) and ids.dtype == torch.int64
    assert int(ids.max()) >= 3, "not limited to the smallest table: the model runs without that"


def test_integers_stay_below_the_smallest_table_where_the_model_needs_that() -> None:
    source = open_model(Tokens(), inputs="2x7:int,types=2x7:int")
    assert int(source.kwargs["types"].max()) < 3 and source.module(*source.args, **source.kwargs).shape == (2, 7, 4)


def test_a_bound_a_name_and_a_mask_can_be_written() -> None:
    source = open_model(Tokens(), inputs="ids=2x7:int:5,mask=2x7:bool")
    assert int(source.kwargs["ids"].max()) < 5 and source.kwargs["mask"].dtype == torch.bool


def test_a_file_holds_the_arguments_under_their_names(tmp_path: Path) -> None:
    ids = torch.tensor([[3, 1, 4]])
    save_file({"ids": ids}, tmp_path / "in.safetensors")
    assert torch.equal(open_model(Tokens(), inputs=str(tmp_path / "in.safetensors")).kwargs["ids"], ids)


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("2x", "expected sizes with x"),
        ("int", "expected sizes with x"),
        ("2x64:long", "expected sizes with x"),
        ("0x3", "expected 1 to"),
        ("9999999x9999999", "expected 1 to"),
        ("2x3:int:0", "bound of 1"),
        ("none.safetensors", "cannot be read"),
        ("ids=2x3:int,ids=2x3:int", "inputs for ids twice"),
    ],
)
def test_what_cannot_be_read_is_refused_with_an_example(written: str, words: str) -> None:
    with pytest.raises(DeadweightError, match=words):
        open_model(Tokens(), inputs=written)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (Tokens(), (2, 5)),
        (nn.Sequential(nn.Linear(6, 4), nn.ReLU()), (2, 5, 6)),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 26 * 26, 2)), (2, 3, 28, 28)),
        (nn.LSTM(6, 4, batch_first=True), (2, 5, 6)),
        (nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), (2, 6)),
    ],
    ids=["table", "linear", "images", "lstm", "batch norm"],
)
def test_without_inputs_the_first_layer_says_what_it_reads(model: nn.Module, shape: tuple[int, ...]) -> None:
    source = open_model(model)
    assert source.args[0].shape == shape
    assert "--inputs" in source.notes[-1], "the report says that the inputs were chosen for the user"


@pytest.mark.parametrize("written", [None, "3x6"])
def test_written_and_guessed_floats_have_the_precision_of_the_module(written: str | None) -> None:
    model = nn.Linear(6, 4, dtype=torch.bfloat16)
    source = open_model(model, inputs=written)
    assert source.args[0].dtype == torch.bfloat16 and source.module(*source.args).dtype == torch.bfloat16


def test_an_audit_without_inputs_finds_what_an_audit_with_inputs_finds() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    guessed, given = deadweight.audit(model), deadweight.audit(model, torch.randn(2, 5, 6))
    assert [(f.code, f.parameter, f.dof) for f in guessed.findings] == [
        (f.code, f.parameter, f.dof) for f in given.findings
    ]
    assert given.findings and not given.notes


def test_a_deep_module_whose_blocks_are_cut_gets_inputs_too() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
    result = deadweight.audit(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False))
    assert {f.parameter for f in result.findings if f.code == "DW002"} == {
        f"layers.{i}.self_attn.in_proj_bias" for i in range(4)
    }


@pytest.mark.parametrize("written", ["2x4", "2x4:int:99", "mask=2x4:bool"])
def test_inputs_on_which_a_module_does_not_run_are_answered_with_those_of_its_first_layer(written: str) -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 2))
    with pytest.raises(
        DeadweightError, match=r"expected inputs that forward\(input\) takes; its layer 0 reads --inputs 2x5:int:7"
    ):
        deadweight.audit(model, written)


def test_a_module_whose_inputs_cannot_be_guessed_says_how_to_write_them() -> None:
    with pytest.raises(DeadweightError, match=r"without example inputs.*--inputs 2x64:int"):
        open_model(nn.Bilinear(4, 3, 2))
