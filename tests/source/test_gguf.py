"""GGUF files are opened with and without their weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from deadweight.errors import DeadweightError
from deadweight.source.model import open_model

gguf = pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small LLaMA in GGUF."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", "llama")


def write_gguf(path: Path, architecture: str) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for add, value in (
        (writer.add_context_length, 5),
        (writer.add_embedding_length, 8),
        (writer.add_block_count, 2),
        (writer.add_feed_forward_length, 12),
        (writer.add_head_count, 2),
        (writer.add_head_count_kv, 2),
        (writer.add_rope_dimension_count, 4),
        (writer.add_layer_norm_rms_eps, 1e-5),
        (writer.add_vocab_size, 11),
    ):
        add(value)
    _write_tensors(writer)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return path


def _write_tensors(writer: Any) -> None:
    shapes = {"token_embd": (11, 8), "output": (11, 8), "output_norm": (8,)}
    for i in range(2):
        shapes |= {f"blk.{i}.attn_{x}": (8, 8) for x in ("q", "k", "v", "output")}
        shapes |= {f"blk.{i}.ffn_gate": (12, 8), f"blk.{i}.ffn_up": (12, 8), f"blk.{i}.ffn_down": (8, 12)}
        shapes |= {f"blk.{i}.attn_norm": (8,), f"blk.{i}.ffn_norm": (8,)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", torch.randn(shape).numpy())


def test_a_gguf_file_is_opened_with_and_without_its_weights(gguf_file: Path) -> None:
    assert isinstance(open_model(str(gguf_file)).module, LlamaForCausalLM)
    source = open_model(str(gguf_file), weights=True)
    assert source.has_weights and sum(p.numel() for p in source.module.parameters()) == 1304


def test_a_gguf_of_an_unknown_architecture_or_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DeadweightError, match="GGUF"):
        open_model(str(write_gguf(tmp_path / "strange.gguf", "no-such-architecture")))
    (tmp_path / "fake.gguf").write_bytes(b"PK\x03\x04 not a model")
    with pytest.raises(DeadweightError, match="expected a GGUF file"):
        open_model(str(tmp_path / "fake.gguf"))


def test_a_gguf_without_the_package_says_what_to_install(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DeadweightError, match="pip install gguf"):
        open_model(str(gguf_file))
