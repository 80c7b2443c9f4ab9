"""Weight files are checked before they are read: truncated, missing, outside of the folder, or pickles."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from deadweight.errors import DeadweightError
from deadweight.source.model import open_model

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def shard(folder: Path, name: str) -> None:
    """Replace the weights by an index that names one file."""
    (folder / WEIGHTS).rename(folder / "shard.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"transformer.wte.weight": name}}))


@pytest.mark.parametrize("size", [0, 7, 100, -8])
def test_truncated_weights_are_refused_though_no_weight_is_read(folder: Path, size: int) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:size])
    with pytest.raises(DeadweightError, match="damaged or truncated"):
        open_model(str(folder))


def test_a_shard_beside_the_config_is_accepted(folder: Path) -> None:
    shard(folder, "shard.safetensors")
    assert not open_model(str(folder)).has_weights


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/../../x.safetensors"])
def test_a_shard_outside_the_folder_is_refused(folder: Path, name: str) -> None:
    shard(folder, name)
    with pytest.raises(DeadweightError, match="outside the folder"):
        open_model(str(folder))


@pytest.mark.parametrize("name", ["link.safetensors", WEIGHTS])
def test_a_link_that_leaves_the_folder_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    save_file({"x": torch.zeros(2)}, tmp_path / "secret.safetensors")
    shard(folder, name)
    (folder / name).symlink_to(tmp_path / "secret.safetensors")
    with pytest.raises(DeadweightError, match="outside the folder"):
        open_model(str(folder))


def test_links_of_the_hub_cache_into_its_blobs_are_accepted(folder: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b/snapshots/abc", tmp_path / "models--a--b/blobs"
    snapshot.parent.mkdir(parents=True)
    blobs.mkdir()
    folder.rename(snapshot)
    (snapshot / WEIGHTS).rename(blobs / "123")
    (snapshot / WEIGHTS).symlink_to("../../blobs/123")
    assert not open_model(str(snapshot)).has_weights


def test_a_missing_shard_is_named(folder: Path) -> None:
    shard(folder, "model-00002-of-00002.safetensors")
    with pytest.raises(DeadweightError, match=r"model-00002-of-00002\.safetensors is missing"):
        open_model(str(folder))


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": {"a": 3}}', '{"weight_map": ["a"]}', "not json"])
def test_an_index_that_is_no_index_is_refused(folder: Path, index: str) -> None:
    (folder / INDEX).write_text(index)
    with pytest.raises(DeadweightError, match=INDEX):
        open_model(str(folder))


def test_escapes_in_file_names_are_not_printed(folder: Path) -> None:
    shard(folder, "../\x1b[31mred\n.safetensors")
    with pytest.raises(DeadweightError) as caught:
        open_model(str(folder))
    assert str(caught.value).isprintable()


def test_a_folder_of_pickles_says_how_to_convert(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(DeadweightError, match="save_pretrained"):
        open_model(str(folder), weights=True)
    assert not open_model(str(folder)).has_weights, "the config alone can be opened"


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".PKL"])
def test_a_pickle_is_refused_even_where_it_does_not_exist(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(DeadweightError, match="loading a pickle can run code"):
        open_model(str(tmp_path / f"model{suffix}"))


def test_a_folder_without_weights_says_so_when_they_are_needed(config_folder: Path) -> None:
    with pytest.raises(DeadweightError, match="holds no weights"):
        open_model(str(config_folder), weights=True)
