"""Safetensors written one tensor at a time are read back by safetensors itself."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from deadweight.save.safetensors_writer import Writer

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.bool]
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), min_size=1, max_size=8))
def test_written_tensors_are_read_back(tmp_path: Path, tensors: list[tuple[tuple[int, ...], torch.dtype]]) -> None:
    wanted = {f"layer.{i}.weight": (torch.randn(shape) * 9).to(dtype) for i, (shape, dtype) in enumerate(tensors)}
    writer = Writer(tmp_path, room=8192)
    for name, tensor in wanted.items():
        writer.add(name, tensor)
    writer.close()
    result = load_file(tmp_path / "model.safetensors")
    assert list(result) == list(wanted) or set(result) == set(wanted)
    for name, tensor in wanted.items():
        assert result[name].dtype == tensor.dtype and torch.equal(result[name], tensor)


def test_a_large_checkpoint_is_cut_into_shards_with_an_index(tmp_path: Path) -> None:
    writer = Writer(tmp_path, room=4096, limit=1000)
    for i in range(5):
        writer.add(f"w{i}", torch.full((100,), float(i)))
    writer.close()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 3 and index["metadata"]["total_size"] == 2000
    for name, file in index["weight_map"].items():
        assert load_file(tmp_path / file)[name][0] == float(name[1:])


def test_a_transposed_tensor_is_written_in_its_own_order(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).reshape(2, 3).T
    writer = Writer(tmp_path, room=512)
    writer.add("w", tensor)
    writer.close()
    assert torch.equal(load_file(tmp_path / "model.safetensors")["w"], tensor)
