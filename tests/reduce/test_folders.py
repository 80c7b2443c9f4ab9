"""Checkpoints as people have them: odd files, odd precisions, odd places; and what --overwrite may replace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LukeConfig, LukeForMaskedLM

import deadweight
from deadweight.errors import DeadweightError

from .conftest import randomise

LUKE_BIAS = "lm_head.decoder.bias"
HEAD, TABLE = "lm_head.weight", "transformer.wte.weight"


def change(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file(load_file(folder / "model.safetensors") | tensors, folder / "model.safetensors", {"format": "pt"})


def in_shards(folder: Path, names: list[str], *, moved: float = 0.0) -> None:
    tensors = {n: t + moved for n, t in load_file(folder / "model.safetensors").items()}
    where = {n: names[i % len(names)] for i, n in enumerate(tensors)}
    for name in names:
        save_file({n: t for n, t in tensors.items() if where[n] == name}, folder / name, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


@pytest.mark.parametrize("layout", ["slim", "stock"])
def test_a_tied_weight_that_is_stored_twice_is_written_once(gpt2: Path, tmp_path: Path, layout: str) -> None:
    plain = deadweight.reduce(gpt2, tmp_path / "plain", layout=layout)
    change(gpt2, {HEAD: load_file(gpt2 / "model.safetensors")[TABLE].clone()})
    result = deadweight.reduce(gpt2, tmp_path / "out", layout=layout)
    assert result.parameters_after == plain.parameters_after
    assert HEAD not in load_file(tmp_path / "out" / "model.safetensors")
    assert deadweight.verify(gpt2, tmp_path / "out").same


@pytest.mark.parametrize("layout", ["slim", "stock"])
def test_a_tied_weight_that_is_stored_under_its_second_name_is_rewritten_there(tmp_path: Path, layout: str) -> None:
    """The bias of the last norm folds into `lm_head.bias`, which LUKE stores as `lm_head.decoder.bias`."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = LukeConfig(**sizes, vocab_size=11, entity_vocab_size=5, entity_emb_size=4, max_position_embeddings=40)
    model = randomise(LukeForMaskedLM(config))
    model.save_pretrained(tmp_path / "luke")
    before, out = load_file(tmp_path / "luke" / "model.safetensors"), tmp_path / "out"
    assert LUKE_BIAS in before and "lm_head.bias" not in before
    deadweight.reduce(tmp_path / "luke", out, layout=layout)
    assert not torch.equal(load_file(out / "model.safetensors")[LUKE_BIAS], before[LUKE_BIAS])
    assert deadweight.verify(tmp_path / "luke", out).same


def test_tied_weights_that_differ_in_the_file_are_refused(gpt2: Path, tmp_path: Path) -> None:
    change(gpt2, {HEAD: load_file(gpt2 / "model.safetensors")[TABLE] + 0.5})
    with pytest.raises(DeadweightError, match=r"tied by the config, but differ.*tie_word_embeddings"):
        deadweight.reduce(gpt2, tmp_path / "out")


@pytest.mark.parametrize("layout", ["slim", "stock"])
@pytest.mark.parametrize("short", ["", ".mlp."])  # all tensors, or some
def test_bfloat16_weights_of_a_float32_config_are_written_in_float32(
    gpt2: Path, tmp_path: Path, short: str, layout: str
) -> None:
    """The config says float32, the file holds bfloat16: rounding again would be thousands of noise floors."""
    tensors = load_file(gpt2 / "model.safetensors")
    change(gpt2, {n: t.to(torch.bfloat16) for n, t in tensors.items() if short in n})
    deadweight.reduce(gpt2, tmp_path / "out", layout=layout)
    assert deadweight.verify(gpt2, tmp_path / "out").same


def test_bfloat16_weights_of_a_bfloat16_config_stay_bfloat16(gpt2: Path, tmp_path: Path) -> None:
    change(gpt2, {n: t.to(torch.bfloat16) for n, t in load_file(gpt2 / "model.safetensors").items()})
    config = json.loads((gpt2 / "config.json").read_text()) | {"dtype": "bfloat16"}
    (gpt2 / "config.json").write_text(json.dumps(config))
    deadweight.reduce(gpt2, tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors").values()
    assert {t.dtype for t in stored if t.is_floating_point()} == {torch.bfloat16}
    assert deadweight.verify(gpt2, tmp_path / "out").same


def test_shards_with_odd_names_and_a_path_with_spaces_and_accents_are_read(gpt2: Path, tmp_path: Path) -> None:
    in_shards(gpt2, ["a b.safetensors", "ü.safetensors", "x.y.safetensors"])
    (gpt2 / "model.safetensors").unlink()
    (place := tmp_path / "päth with späces").mkdir()
    source = gpt2.rename(place / "modèle")
    deadweight.reduce(source, place / "öut")
    assert deadweight.verify(source, place / "öut").same


def test_a_single_file_takes_precedence_over_an_index_as_in_transformers(gpt2: Path, tmp_path: Path) -> None:
    in_shards(gpt2, ["other.safetensors"], moved=1.0)
    deadweight.reduce(gpt2, tmp_path / "out")
    assert deadweight.verify(gpt2, tmp_path / "out").same


def test_a_tensor_that_the_model_does_not_read_may_have_any_format(gpt2: Path, tmp_path: Path) -> None:
    kinds = (torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.uint16, torch.uint32, torch.uint64)
    spare = {f"spare.{i}": torch.arange(3).to(kind) for i, kind in enumerate(kinds)}
    change(gpt2, spare)
    deadweight.reduce(gpt2, tmp_path / "out", select="key-bias")
    written = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in spare.items():
        assert written[name].dtype == tensor.dtype and torch.equal(
            written[name].view(torch.uint8), tensor.view(torch.uint8)
        )
    change(gpt2, {TABLE: load_file(gpt2 / "model.safetensors")[TABLE].to(torch.float8_e4m3fn)})
    with pytest.raises(DeadweightError, match=f"{TABLE} is stored as torch.float8_e4m3fn; expected floating-point"):
        deadweight.reduce(gpt2, tmp_path / "other")


@pytest.mark.parametrize("layout", ["slim", "stock"])
def test_a_checkpoint_with_a_head_is_reduced_as_the_model_without_it(gpt2: Path, tmp_path: Path, layout: str) -> None:
    """The names in the file have a prefix that those of the model lack; the head's has none."""
    change(gpt2, {"score.weight": torch.ones(3, 8)})
    config = json.loads((gpt2 / "config.json").read_text())
    (gpt2 / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2Model"]}))
    deadweight.reduce(gpt2, tmp_path / "out", layout=layout)
    assert deadweight.verify(gpt2, tmp_path / "out").same


def test_weights_that_are_not_those_of_the_model_are_noticed(
    gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deadweight.reduce.job import ReductionJob

    honest = ReductionJob.read
    monkeypatch.setattr(ReductionJob, "read", lambda self, name: honest(self, name) + 1)
    with pytest.raises(DeadweightError, match="differs from the loaded model's"):
        deadweight.reduce(gpt2, tmp_path / "out")


def test_a_link_is_followed_to_where_it_points(gpt2: Path, tmp_path: Path) -> None:
    link, place = tmp_path / "link", tmp_path / "place"
    link.symlink_to(place)
    deadweight.reduce(gpt2, link)
    assert link.is_symlink() and (place / "deadweight.json").is_file()
    with pytest.raises(DeadweightError, match="exists"):
        deadweight.reduce(gpt2, link)
    deadweight.reduce(gpt2, link, overwrite=True)
    assert link.is_symlink() and deadweight.verify(gpt2, link).same


def test_a_link_out_of_the_folder_is_not_copied(gpt2: Path, tmp_path: Path) -> None:
    (tmp_path / "private.txt").write_text("private")
    (gpt2 / "tokens.txt").symlink_to(tmp_path / "private.txt")
    (gpt2 / "own.txt").write_text("own")
    (gpt2 / "again.txt").symlink_to("own.txt")
    deadweight.reduce(gpt2, tmp_path / "out", select="key-bias")
    copied = {p.name: p.read_text() for p in (tmp_path / "out").glob("*.txt")}
    assert copied == {"own.txt": "own", "again.txt": "own"}


def test_overwrite_never_takes_the_model_with_it(gpt2: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")  # looks like a checkpoint
    (tmp_path / "link").symlink_to(gpt2)
    for out in (tmp_path, gpt2, gpt2 / "out", tmp_path / "link"):
        with pytest.raises(DeadweightError, match=r"contains the model|is the model's own folder"):
            deadweight.reduce(gpt2, out, overwrite=True)
    assert (gpt2 / "model.safetensors").is_file()


def test_overwrite_replaces_a_checkpoint_and_nothing_else(
    gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (letters := tmp_path / "letters").mkdir()
    (letters / "to a friend").write_text("x")
    with pytest.raises(DeadweightError, match="expected a checkpoint for --overwrite to replace"):
        deadweight.reduce(gpt2, letters, overwrite=True)
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    with pytest.raises(DeadweightError, match="is the working directory"):
        deadweight.reduce(gpt2, ".", overwrite=True)
    (empty := tmp_path / "empty").mkdir()
    deadweight.reduce(gpt2, empty, overwrite=True)
    assert (letters / "to a friend").is_file() and (empty / "deadweight.json").is_file()


@pytest.mark.parametrize("out", ["x" * 300, "~nobody-of-this-name/out"])
def test_a_name_that_no_folder_can_have_is_refused(gpt2: Path, tmp_path: Path, out: str) -> None:
    with pytest.raises(DeadweightError, match="cannot be a folder"):
        deadweight.reduce(gpt2, tmp_path / out if out[0] == "x" else out)
    with pytest.raises(DeadweightError, match="cannot be looked up"):
        deadweight.reduce("~nobody-of-this-name/model", tmp_path / "out")


def test_an_adapter_is_to_be_merged_first(gpt2: Path, tmp_path: Path) -> None:
    (gpt2 / "adapter_config.json").write_text("{}")
    with pytest.raises(DeadweightError, match=r"holds an adapter.*merge_and_unload"):
        deadweight.reduce(gpt2, tmp_path / "out")
    (gpt2 / "config.json").unlink()
    with pytest.raises(DeadweightError, match=r"is an adapter, not a model.*merge_and_unload"):
        deadweight.reduce(gpt2, tmp_path / "out")
