"""A streamed model computes the same as before, and holds one block at a time."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn

import deadweight
from deadweight.compress import heal, streaming
from deadweight.compress import measure as measuring
from deadweight.compress.attention_calls import AttentionCall, observing
from deadweight.compress.head_moments import HeadMoments, HeadRecorder
from deadweight.compress.head_spaces import find_head_spaces
from deadweight.compress.heal import Healing, distil
from deadweight.compress.locate import locate
from deadweight.compress.measure import measure, probe
from deadweight.compress.run import compress, open_streamed
from deadweight.compress.slim_form import assemble_slim
from deadweight.compress.streaming import blocks_of, device_of, float_of, gather_weights, run_again, stream
from deadweight.compress.truncate import KeptDimensions, truncate_model
from deadweight.errors import DeadweightError

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
@pytest.mark.parametrize("large", [1, 1 << 24])
def test_half_precision_computes_in_float32_a_block_at_a_time(
    family: str, large: int, make: Callable, batch_for: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "LARGE", large)
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
    assert a.dtype == torch.float32
    torch.testing.assert_close(a, b)
    outside = len(list(model.parameters())) - sum(len(list(block.parameters())) for block in blocks)
    assert 0 < max(seen) <= largest + outside < len(list(model.parameters()))
    assert converted(model) == len(staying)
    assert converted(gather_weights(model)) == len(list(model.parameters()))
    with torch.no_grad():
        torch.testing.assert_close(model(**batch)[0], b)


def test_weights_are_back_after_an_error(make: Callable, words: Any) -> None:
    model: Any = make("llama").to(torch.bfloat16)
    stream(model, CPU, torch.float32)
    staying = converted(model)
    hook = model.model.layers[1].mlp.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**words)
    hook.remove()
    assert converted(model) == staying == 3  # outside blocks
    with torch.no_grad():
        assert model(**words).logits.dtype == torch.float32


def by_hand(model: Any, heads: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """E ∂out ∂outᵀ of every head from one graph through the whole model."""
    kept: dict[str, Tensor] = {}

    def observer(call: AttentionCall) -> Tensor:
        out = call.attend(call.query, call.key, call.value)
        kept[call.path] = out if out.requires_grad else out.detach().requires_grad_()
        return kept[call.path]

    with observing(model, observer), torch.enable_grad():
        loss = probe(model(**batch), torch.Generator().manual_seed(0))
    gradients = torch.autograd.grad(loss, [kept[h.path] for h in heads])
    found = {}
    for h, g in zip(heads, gradients, strict=True):
        flat = g.transpose(0, 1).flatten(1, 2).double()
        found[h.path] = flat.transpose(1, 2) @ flat / flat.shape[1]
    return found


@pytest.mark.parametrize("family", ["llama", "bert", "whisper", "vit"])
def test_gradients_of_recomputed_blocks_are_those_of_the_whole_model(
    family: str, make: Callable, batch_for: Callable
) -> None:
    source, _ = open_streamed(make(family), "cpu")
    agrees(source, batch_for(family))
    assert not any("forward" in module.__dict__ for module in source.module.modules())


def agrees(source: Any, batch: dict[str, Tensor]) -> None:
    """What is measured is what one graph of the whole model gives."""
    heads = locate(source)
    expected = by_hand(source.module, heads, batch)
    found = measure(source.module, HeadRecorder, {h.path: HeadMoments.empty(h) for h in heads}, [batch])
    for path, moment in expected.items():
        near = 1e-6 * float(moment.abs().max())
        assert torch.allclose(found[path].mean().out_gradient, moment, rtol=1e-4, atol=near), path
        assert found[path].tokens == found[path].graded


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "after": lambda block: block.register_forward_hook(lambda m, args, out: 0.5 * out),
    "before": lambda block: block.register_forward_pre_hook(lambda m, args: (2 * args[0], *args[1:])),
}


@pytest.mark.parametrize("where", HOOKS)
def test_hooks_of_the_user_run_once(where: str, make: Callable, words: Any) -> None:
    model = make("llama")
    for block in model.model.layers:
        HOOKS[where](block)
    agrees(open_streamed(model, "cpu")[0], {"input_ids": words["input_ids"][:4]})


@dataclasses.dataclass
class Carried:
    """An object that pytree does not look into."""

    x: Tensor


class Strange(nn.Module):
    """A block with unusual arguments and results."""

    def __init__(self, block: nn.Module, way: str) -> None:
        super().__init__()
        self.block, self.way = block, way

    def forward(self, x: Any, *args: Any, store: Any = None, **kwargs: Any) -> Any:
        if self.way == "in place":
            return x.copy_(self.block(x.clone(), *args, **kwargs))
        out = self.block(x.x if self.way == "takes" else x, *args, **kwargs)
        if self.way == "writes":
            store["out"] = out
        return Carried(out) if self.way == "gives" else out


class Caller(nn.Module):
    """A model that calls a block, or its parts."""

    def __init__(self, block: nn.Module, way: str) -> None:
        super().__init__()
        self.way, self.strange = way, Strange(block, way)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        store: dict[str, Tensor] = {}
        if self.way == "parts":
            return self.strange.block(x, *args, **kwargs)
        if self.way == "in place":  # and whoever gave it does not want it back
            return self.strange(x.clone(), *args, **kwargs)
        if self.way == "nothing":
            self.strange.forward = lambda x, *args, **kwargs: x
            return self.strange.block(self.strange(x), *args, **kwargs)
        out = self.strange(Carried(x) if self.way == "takes" else x, *args, store=store, **kwargs)
        return out.x if self.way == "gives" else store.get("out", out)


@pytest.mark.parametrize("way", ["plain", "takes", "gives", "writes", "parts", "in place", "nothing"])
def test_blocks_that_cannot_be_recomputed_are_measured_in_one_graph(
    way: str, make: Callable, words: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make("llama")
    for i, block in enumerate(model.model.layers):
        model.model.layers[i] = Caller(block, way)
    blocks = [f"model.layers.{i}.strange" for i in range(2)]
    monkeypatch.setattr(streaming, "blocks_of", lambda model, paths=(): blocks)
    seen: list[bool] = []
    one = measuring.add_graded

    def told(*args: Any) -> bool:
        seen.append(args[4])  # whether the whole model is one graph
        return one(*args)

    monkeypatch.setattr(measuring, "add_graded", told)
    agrees(open_streamed(model, "cpu")[0], {"input_ids": words["input_ids"][:4]})
    assert seen == ([False] if way == "plain" else [False, True])


def test_blocks_are_recomputed_in_a_thread_of_autograd(
    make: Callable, words: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where context variables of the caller are not set."""
    plain = streaming.backward

    def elsewhere(*args: Any) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(plain, *args).result()

    monkeypatch.setattr(streaming, "backward", elsewhere)
    agrees(open_streamed(make("llama"), "cpu")[0], {"input_ids": words["input_ids"][:4]})


@pytest.mark.parametrize("family", ["gemma2", "bert", "llama"])
@pytest.mark.parametrize("large", [1, 1 << 24])
def test_tied_and_trainable_parameters_stay_so(
    family: str, large: int, make: Callable, words: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "LARGE", large)
    model = make(family).to(torch.bfloat16)
    own = sum(p.numel() for p in model.parameters())
    model.save_pretrained(tmp_path / "model")  # positions are not rounded there
    model = str(tmp_path / "model")
    share: Any = {"keep_attention": 0.8} if family == "bert" else {"keep_attention": 0.5, "step": 2}
    found = compress(model, inputs=words, **share)
    assert found.parameters_before == own
    small: Any = found.module
    assert all(p.requires_grad for p in small.parameters())
    written = compress(model, tmp_path / "out", inputs=words, **share)
    assert written.module is None and written.parameters_after == found.parameters_after
    loaded: Any = deadweight.load(tmp_path / "out")
    assert sum(p.numel() for p in loaded.parameters()) == found.parameters_after
    with torch.no_grad():
        torch.testing.assert_close(loaded.float()(words["input_ids"][:2])[0], small(words["input_ids"][:2])[0])


def test_a_model_that_reads_weights_of_parts_it_does_not_call_is_not_streamed(make: Callable, words: Any) -> None:
    model = make("llama").to(torch.bfloat16)
    gate = model.model.layers[0].mlp.gate_proj
    model.lm_head.register_forward_pre_hook(lambda m, args: (args[0] @ gate.weight.T @ gate.weight,))
    stream(copy.deepcopy(model), CPU, torch.float32)
    source, _ = open_streamed(model.requires_grad_(False), "cpu")
    assert converted(source.module) == len(list(source.module.parameters()))


def test_healing_a_stock_model_does_not_change_the_original(
    make: Callable, words: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed: list[Any] = []
    plain = heal.distil

    def watched(original: Any, compressed: Any, *args: Any, **kwargs: Any) -> None:
        before = copy.deepcopy(original.state_dict())
        plain(original, compressed, *args, **kwargs)
        changed.append([n for n, t in original.state_dict().items() if not torch.equal(before[n], t)])

    monkeypatch.setattr(heal, "distil", watched)
    compress(make("llama"), layout="stock", inputs=words, heal=4, heal_rate=3e-3, keep_attention=0.85)
    assert changed == [[]]


def test_blocks_are_modules_that_are_called() -> None:
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
    """Two blocks; the loss depends on the first alone, and nothing reads the second."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks[0](x)
        self.blocks[1](y)
        return y


def test_a_block_whose_output_is_unused_is_recomputed_without_gradients() -> None:
    model = Aside().requires_grad_(False)
    asked: list[list[Tensor]] = []

    class Watcher:
        again = False

        def answer(self, outputs: Any, given: Any, inputs: Any) -> Any:
            asked.append(list(given))
            return torch.autograd.grad(outputs, inputs, given) if inputs else ()

    with run_again(model, (), Watcher()) as go_back:
        go_back(model(torch.ones(2, 3, requires_grad=True)).sum())
    assert [float(g[0].abs().sum()) for g in asked] == [0.0, 6.0]


def test_a_checkpoint_in_half_precision_keeps_its_precision_and_the_same_heads(
    make: Callable, words: Any, tmp_path: Path
) -> None:
    model = make("llama").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "half")
    model.float().save_pretrained(tmp_path / "wide")
    half, wide = (compress(str(tmp_path / n), keep_attention=0.5, inputs=words, step=2) for n in ("half", "wide"))
    assert half.kept == wide.kept
    assert half.judgement.error == pytest.approx(wide.judgement.error, rel=0.05)
    assert half.judgement.error != wide.judgement.error  # what is judged is what is written: rounded
    written = compress(str(tmp_path / "half"), tmp_path / "out", keep_attention=0.5, inputs=words, step=2)
    assert written.module is None
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        kinds = {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    assert kinds <= {"BF16", "I32"}


def test_healing_leaves_the_original_as_it_was(make: Callable, words: Any) -> None:
    source, _ = open_streamed(make("llama"), "cpu")
    before = copy.deepcopy(source.module.state_dict())
    heads = locate(source)
    sums = measure(source.module, HeadRecorder, {h.path: HeadMoments.empty(h) for h in heads}, [words])
    spaces = [find_head_spaces(h, sums[h.path].mean(), source.module) for h in heads]
    kept = {h.path: KeptDimensions((4,) * h.key_heads, (0,) * h.key_heads, (2,) * h.key_heads) for h in heads}
    small, _ = assemble_slim(truncate_model(source.module, spaces, kept, bias=True))
    shared = {id(p) for p in source.module.parameters()} & {id(p) for p in small.parameters()}
    assert len(shared) == len([n for n in before if "self_attn" not in n])
    distil(source.module, small, [words], Healing(3))
    assert all(torch.equal(before[n], t) for n, t in source.module.state_dict().items())
    assert not {id(p) for p in source.module.parameters()} & {id(p) for p in small.parameters()}


def test_what_the_located_examples_do_not_reach_stays_as_it_is(make: Callable) -> None:
    """Images in front of a language model: their tower is hooked into by transformers itself, and is left alone."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = transformers.LlavaConfig(
        text_config=make("llama").config,
        vision_config=transformers.CLIPVisionConfig(**sizes, num_hidden_layers=3, image_size=32, patch_size=8),
        image_token_index=98,
    )
    model = transformers.LlavaForConditionalGeneration(config).eval()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 98, (8, 32), generator=generator)
    ids[:, 2:18] = 98
    inputs = {"input_ids": ids, "pixel_values": torch.randn(8, 3, 32, 32, generator=generator)}
    whole: Any = compress(model, inputs=inputs, keep_attention=1.0)
    half = compress(model, inputs=inputs, keep_attention=0.5, step=2)
    assert all("language_model" in path for path in half.kept) and half.judgement.error > 0
    with torch.no_grad():
        assert torch.allclose(whole.module(**inputs).logits, model(**inputs).logits, atol=1e-5)


def test_an_output_that_nothing_can_be_judged_by_is_refused(words: Any) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
    config = transformers.CLIPConfig(
        text_config={**sizes, "vocab_size": 99}, vision_config={**sizes, "image_size": 32, "patch_size": 8}
    )
    inputs = {"input_ids": words["input_ids"][:8], "pixel_values": torch.randn(8, 3, 32, 32)}
    with pytest.raises(DeadweightError, match="found a CLIPOutput"):
        compress(transformers.CLIPModel(config).eval(), inputs=inputs, keep_attention=0.7)
