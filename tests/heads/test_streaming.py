"""A model that is streamed computes what it computed, and holds one block at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from deadweight.heads.assemble import assembled
from deadweight.heads.budget import spaces_of
from deadweight.heads.compress import compress, opened
from deadweight.heads.heal import healed
from deadweight.heads.locate import locate
from deadweight.heads.moments import Moments, measure, probe
from deadweight.heads.observe import observing
from deadweight.heads.streaming import blocks_of, device_of, float_of, gathered, run_again, stream
from deadweight.heads.truncate import Kept, cut

CPU = torch.device("cpu")


@pytest.fixture
def batch_for(words: Any) -> Callable[[str], dict[str, Tensor]]:
    def batch(family: str) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(2)
        if family == "vit":
            return {"pixel_values": torch.randn(4, 3, 32, 32, generator=generator)}
        if family == "whisper":
            sound = torch.randn(4, 8, 100, generator=generator)
            return {"input_features": sound, "decoder_input_ids": words["input_ids"][:4, :8]}
        return {"input_ids": words["input_ids"][:4]}

    return batch


def converted(model: nn.Module) -> int:
    return sum(p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "vit", "whisper", "ours"])
def test_half_precision_computes_in_float32_a_block_at_a_time(family: str, make: Callable, batch_for: Callable) -> None:
    model: Any = make(family).to(torch.bfloat16)
    batch = batch_for(family)
    wide = copy.deepcopy(model).float()
    blocks = [model.get_submodule(path) for path in blocks_of(model)]
    largest = max(len(list(block.parameters())) for block in blocks)
    seen: list[int] = []
    stream(model, CPU, torch.float32)
    staying = {name for name, p in model.named_parameters() if p.dtype == torch.float32}
    assert not any(name.startswith(f"{path}.") for name in staying for path in blocks_of(model))
    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(lambda *_: seen.append(converted(model)))
    assert (device_of(model), float_of(model)) == (CPU, torch.float32)
    with torch.no_grad():
        a, b = model(**batch)[0], wide(**batch)[0]
    assert a.dtype == torch.float32 and torch.equal(a, b)
    outside = len(list(model.parameters())) - sum(len(list(block.parameters())) for block in blocks)
    assert 0 < max(seen) <= largest + outside < len(list(model.parameters()))
    assert converted(model) == len(staying)
    assert converted(gathered(model)) == len(list(model.parameters()))
    with torch.no_grad():
        assert torch.equal(model(**batch)[0], b)


def test_weights_are_back_after_an_error(make: Callable, words: Any) -> None:
    model: Any = make("llama").to(torch.bfloat16)
    stream(model, CPU, torch.float32)
    staying = converted(model)
    hook = model.model.layers[1].mlp.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**words)
    hook.remove()
    assert converted(model) == staying == 1
    with torch.no_grad():
        assert model(**words).logits.dtype == torch.float32


def by_hand(model: Any, heads: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """E ∂out ∂outᵀ of every head from one graph through the whole model."""
    kept: dict[str, Tensor] = {}

    def observer(path: str, q: Tensor, k: Tensor, v: Tensor, attend: Any, how: Any) -> Tensor:
        out = attend(q, k, v)
        kept[path] = out if out.requires_grad else out.detach().requires_grad_()
        return kept[path]

    with observing(model, observer), torch.enable_grad():
        loss = probe(model(**batch), torch.Generator().manual_seed(0))
    gradients = torch.autograd.grad(loss, [kept[h.path] for h in heads])
    found = {}
    for h, g in zip(heads, gradients, strict=True):
        flat = g.transpose(0, 1).flatten(1, 2).double()
        found[h.path] = flat.transpose(1, 2) @ flat / flat.shape[1]
    return found


@pytest.mark.parametrize("family", ["llama", "bert", "whisper", "vit"])
def test_gradients_of_blocks_that_run_again_are_those_of_the_whole(
    family: str, make: Callable, batch_for: Callable
) -> None:
    source, _ = opened(make(family), "cpu")
    model, heads = source.module, locate(source)
    batch = batch_for(family)
    expected = by_hand(model, heads, batch)
    found = {p: m.mean() for p, m in measure(model, {h.path: Moments(h, 1) for h in heads}, [batch]).items()}
    for path, moment in expected.items():
        assert torch.allclose(found[path].out_gradient, moment, rtol=1e-4, atol=1e-6 * float(moment.abs().max())), path
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_blocks_are_what_is_called() -> None:
    def layer() -> nn.Linear:
        return nn.Linear(2, 2)

    model = nn.Module()
    model.plain = nn.ModuleDict({"norm": layer(), "h": nn.ModuleList([layer(), nn.Sequential(layer())])})
    model.nested = nn.ModuleList([nn.ModuleList([layer(), layer()]), nn.ModuleDict({"a": layer()})])
    model.deep = nn.Sequential(nn.Sequential(nn.ModuleList([layer()])))
    expected = ["plain.h.0", "plain.h.1", "nested.0.0", "nested.0.1", "nested.1.a", "deep.0.0.0"]
    assert blocks_of(model) == expected
    assert blocks_of(model, ["plain.norm", "plain.h.1.0"]) == [*expected, "plain.norm"]


class Aside(nn.Module):
    """Two blocks, of which the loss depends on the first; the second makes what nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks[0](x)
        self.blocks[1](y)
        return y


def test_a_block_that_nobody_reads_runs_again_and_answers_nothing() -> None:
    model = Aside().requires_grad_(False)
    asked: list[list[Tensor]] = []

    def answer(outputs: Any, given: Any, inputs: Any) -> Any:
        asked.append(list(given))
        return torch.autograd.grad(outputs, inputs, given) if inputs else ()

    with run_again(model, (), answer) as go_back:
        go_back(model(torch.ones(2, 3, requires_grad=True)).sum())
    assert [float(g[0].abs().sum()) for g in asked] == [0.0, 6.0]


def test_a_checkpoint_in_half_precision_keeps_its_precision_and_the_same_heads(
    make: Callable, words: Any, tmp_path: Path
) -> None:
    model = make("llama").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "half")
    model.float().save_pretrained(tmp_path / "wide")
    half, wide = (compress(str(tmp_path / n), keep_kv=0.5, inputs=words, step=2) for n in ("half", "wide"))
    assert half.kept == wide.kept
    assert half.judgement.error == pytest.approx(wide.judgement.error, rel=0.05)
    assert half.judgement.error != wide.judgement.error  # what is judged is what is written: rounded
    written = compress(str(tmp_path / "half"), tmp_path / "out", keep_kv=0.5, inputs=words, step=2)
    assert converted(written.module) == 1  # type: ignore[arg-type]
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        kinds = {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    assert kinds <= {"BF16", "I32"}


def test_healing_leaves_the_original_as_it_was(make: Callable, words: Any) -> None:
    source, _ = opened(make("llama"), "cpu")
    before = copy.deepcopy(source.module.state_dict())
    heads = locate(source)
    moments = measure(source.module, {h.path: Moments(h, 1) for h in heads}, [words])
    spaces = [spaces_of(h, moments[h.path], source.module) for h in heads]
    kept = {h.path: Kept((4,) * h.key_heads, (0,) * h.key_heads, (2,) * h.key_heads) for h in heads}
    small, _ = assembled(cut(source.module, spaces, kept, bias=True))
    shared = {id(p) for p in source.module.parameters()} & {id(p) for p in small.parameters()}
    assert len(shared) == len([n for n in before if "self_attn" not in n])
    healed(source.module, small, [words], 3)
    assert all(torch.equal(before[n], t) for n, t in source.module.state_dict().items())
    assert not {id(p) for p in source.module.parameters()} & {id(p) for p in small.parameters()}
