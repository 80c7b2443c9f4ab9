"""A deep model is audited on a few of its blocks: the answer must be that of the whole model."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertModel, Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel

import deadweight
import deadweight.audit.run
from deadweight.audit.clone_measurements import Measured
from deadweight.source import model as source_model
from deadweight.source.blocks import signature

DEPTH, WIDTH = 8, 8
SIZES = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 12, "vocab_size": 11}
SIZES |= {"num_hidden_layers": DEPTH, "max_position_embeddings": 8}


def gpt2() -> nn.Module:
    sizes = {"n_embd": 8, "n_head": 2, "n_layer": DEPTH, "vocab_size": 11, "n_positions": 8, "n_inner": 12}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def bert() -> nn.Module:
    return BertModel(BertConfig(**SIZES), add_pooling_layer=False)


def gemma2() -> nn.Module:
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, num_key_value_heads=1, head_dim=2, sliding_window=3, pad_token_id=0))


def summary(result: deadweight.Audit) -> set[tuple[Any, ...]]:
    return {(f.code, f.parameter, f.slice, f.dof, f.verdict, f.tier, frozenset(f.into)) for f in result.findings}


def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace at full depth."""
    monkeypatch.setattr(source_model, "collapse", lambda *_, **__: ())


@pytest.fixture(autouse=True)
def proofs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured: what is compared is what was proved."""
    monkeypatch.setattr(deadweight.audit.run, "measure", lambda *_, **__: Measured())


@pytest.mark.parametrize("build", [gpt2, bert, pytest.param(gemma2, marks=pytest.mark.slow)])
def test_a_few_blocks_give_the_findings_of_all(build: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    short = deadweight.audit(build())
    whole(monkeypatch)
    assert summary(short) == summary(deadweight.audit(build()))


def named_in_proofs(result: deadweight.Audit, left_out: str = "$^") -> dict[tuple[Any, ...], set[str]]:
    """For every finding the blocks that its proof speaks of, without the parts of lines that match `left_out`."""
    words = {
        (f.code, f.parameter, f.slice): " ".join(re.sub(left_out, "", s) for s in f.proof) for f in result.findings
    }
    return {key: set(re.findall(r"\b(?:h|layer|blocks)\.\d+\.", text)) for key, text in words.items()}


MODULE_AND_LINE = r"^[\w.*]+, \S+:\d+ "


@pytest.mark.parametrize("build", [gpt2, bert])
def test_a_proof_speaks_of_the_block_it_is_about(
    build: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    short = deadweight.audit(build())
    assert sum(map(bool, named_in_proofs(short, MODULE_AND_LINE).values())) > DEPTH
    whole(monkeypatch)
    long = deadweight.audit(build())
    assert named_in_proofs(short, MODULE_AND_LINE) == named_in_proofs(long, MODULE_AND_LINE)
    modules_of_all = named_in_proofs(long)
    assert all(blocks <= modules_of_all[key] for key, blocks in named_in_proofs(short).items())
    assert any(".*" in step.partition("[")[0] for f in short.findings for step in f.proof), "a block that was cut out"


class Scaled(nn.Module):
    """A branch behind a scale per channel."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.inner(torch.tanh(self.norm(x)))


def test_a_note_is_the_same_for_all_blocks() -> None:
    blocks = nn.Sequential(*[Scaled() for _ in range(DEPTH)])
    model = nn.Sequential(OrderedDict(blocks=blocks, norm=nn.LayerNorm(WIDTH)))
    result = [f for f in deadweight.audit(model, torch.randn(2, 5, WIDTH)).findings if "1/" in f.note]
    assert len(result) == 2 * DEPTH and len({f.note for f in result}) == 1
    assert all(f"{f.parameter.rpartition('.inner')[0]}.scale" in " ".join(f.proof) for f in result)


class Block(nn.Module):
    """A pre-norm feed-forward block."""

    def __init__(self, activation: Callable[[Tensor], Tensor] = F.relu) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.activation = activation

    def forward(self, x: Tensor, keep: float = 1.0) -> Tensor:
        return x * keep + self.down(self.activation(self.up(self.norm(x))))


class Deep(nn.Module):
    """Eight blocks; the model around them may treat some of them differently."""

    def __init__(self, *, odd: Callable | None = None, taps: Sequence[int] = (), twice: int = -1) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList([Block(odd if odd and i == 5 else F.relu) for i in range(DEPTH)])
        self.final, self.readout = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)
        self.taps, self.twice = taps, twice

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x, seen = self.embed(x), []
        for i, block in enumerate(self.blocks):
            x = self.through(block, i, x)
            if i in self.taps:
                seen.append(x)
        return self.readout(self.final(x)), *seen

    def through(self, block: nn.Module, i: int, x: Tensor) -> Tensor:
        x = block(x)
        return block(x) if i == self.twice else x


class Sums(Deep):
    """The readout sees the stream of block 5 too."""

    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.embed(x), torch.zeros(())
        for i, block in enumerate(self.blocks):
            x = block(x)
            kept = x if i == 5 else kept
        return self.readout(self.final(x) + kept)


class Functional(Deep):
    """Block 5 alone is followed by a nonlinearity of the model's own."""

    def through(self, block: nn.Module, i: int, x: Tensor) -> Tensor:
        return torch.tanh(block(x)) if i == 5 else block(x)


class Uneven(Deep):
    """Two blocks of one kind, then one of another that reads the stream without subtracting a mean, and so on."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(12)])
        for block in list(self.blocks)[2::3]:
            block.norm = nn.RMSNorm(WIDTH)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Deep,
    "a function that differs": lambda: Deep(odd=F.gelu),
    "a method that differs": lambda: Deep(odd=nn.Softplus(2.0).forward),
    "a stream that is an output": lambda: Deep(taps=(5,)),
    "a stream that the readout sees": Sums,
    "a block that runs twice": lambda: Deep(twice=5),
}
NEIGHBOURLY: dict[str, Callable[[], nn.Module]] = {
    "a step between two blocks": Functional,
    "two kinds in an uneven pattern": Uneven,
}
CASES = [pytest.param(build, id=name) for name, build in MODELS.items()]
CASES += [pytest.param(build, id=name) for name, build in NEIGHBOURLY.items()]


@pytest.mark.parametrize("build", CASES)
def test_what_the_model_does_with_its_blocks_is_seen(
    build: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(2, 5, 4)
    short = deadweight.audit(build(), x)
    whole(monkeypatch)
    assert summary(short) == summary(deadweight.audit(build(), x))


def test_blocks_with_equal_partial_functions_are_of_one_kind() -> None:
    leaky = partial(F.leaky_relu, negative_slope=0.1)
    assert signature(Block(leaky)) == signature(Block(partial(F.leaky_relu, negative_slope=0.1)))
    assert signature(Block(leaky)) != signature(Block(partial(F.leaky_relu, negative_slope=0.2)))
    assert signature(Block(leaky)) != signature(Block(partial(F.elu, alpha=0.1)))
    assert signature(Block(leaky)) != signature(Block(F.leaky_relu))


def test_the_users_own_module_is_left_alone() -> None:
    module = Deep()
    deadweight.audit(module, torch.randn(2, 5, 4))
    assert len(module.blocks) == DEPTH and module.training
