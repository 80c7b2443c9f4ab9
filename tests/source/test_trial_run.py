"""One run before anything long: what fails is said in one line, and the user's module stays as it is."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deadweight
from deadweight.errors import DeadweightError
from deadweight.source.model import open_model
from deadweight.source.module_copies import copy_tensors, rebuilt, share_tensors

X = torch.randn(3, 4)


class Base(nn.Module):
    """A linear map before a LayerNorm, whose bias has one dead direction."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.linear(x))


class Gpt(nn.Module):
    """Eight positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places, self.head = nn.Embedding(11, 8), nn.Embedding(8, 8), nn.Linear(8, 11)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.tokens(ids) + self.places(torch.arange(ids.shape[1])))


def test_more_tokens_than_positions_are_refused_at_once() -> None:
    start = time.monotonic()
    with pytest.raises(DeadweightError, match=r"IndexError: index out of range.*test_trial_run.py:\d+") as caught:
        deadweight.audit(Gpt(), torch.zeros(1, 12, dtype=torch.long))
    assert (
        str(caught.value).isprintable() and time.monotonic() - start < 20
    )  # it took more than a minute; a busy machine is slow


def test_as_many_tokens_as_positions_are_audited() -> None:
    assert deadweight.audit(Gpt(), torch.zeros(1, 8, dtype=torch.long)).untraced is None


class Raising(Base):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("no such head")


def test_a_forward_that_raises_is_refused_with_its_exception_and_its_line() -> None:
    with pytest.raises(DeadweightError, match=r"KeyError: 'no such head', at test_trial_run.py:\d+"):
        deadweight.audit(Raising(), X)


class WithNone(Base):
    """Lists that hold None, as libraries write them where a layer is switched off."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleList([nn.ModuleList([None, nn.Linear(4, 4)]) for _ in range(5)])  # type: ignore[list-item]
        self.pairs.append(None)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        for pair in self.pairs:
            x = x if pair is None else pair[1](x)
        return self.norm(x)


class WithLock(Base):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Delegating(Base):
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("linear"), name)


def hooked() -> nn.Module:
    module = Base()
    module.linear.register_forward_hook(lambda _, __, output: output * 2)
    module.linear.register_forward_pre_hook(lambda _, inputs: (inputs[0] + 1,))
    return module


def partial_forward() -> nn.Module:
    module = Base()
    module.forward = functools.partial(Base.forward, module)  # type: ignore[method-assign]
    return module


def of_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return Base()


ODD: dict[str, Callable[[], nn.Module]] = {
    "lists with None": WithNone,
    "a lock": WithLock,
    "attributes of a layer": Delegating,
    "hooks": hooked,
    "a partial forward": partial_forward,
    "parameters of inference mode": of_inference_mode,
    "torch.compile": lambda: torch.compile(Base()),
    "data parallel": lambda: nn.DataParallel(Base()),
}


@pytest.mark.parametrize("build", ODD.values(), ids=list(ODD))
def test_an_odd_module_is_proved_like_any_other(build: Callable[[], nn.Module]) -> None:
    result = deadweight.audit(build(), X)
    assert result.untraced is None and "DW005" in {f.code for f in result.findings}


def test_a_compiled_module_is_reported_by_its_own_names() -> None:
    assert {f.parameter for f in deadweight.audit(torch.compile(Base()), X).findings} <= set(Base().state_dict())


def test_a_torchscript_module_is_refused_in_words() -> None:
    with pytest.raises(DeadweightError, match=r"TorchScript.*expected the eager module"):
        deadweight.audit(torch.jit.trace(Base(), X), X)


def test_a_lazy_buffer_is_refused_in_words() -> None:
    with pytest.raises(DeadweightError, match=r"running_mean.*run a lazy module forward once"):
        deadweight.audit(nn.LazyBatchNorm1d(affine=False), X)


class WritesParameter(Base):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.norm.bias.add_(1.0)
        return super().forward(x)


class Keeps(Base):
    """Counts its calls, and keeps its last result."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.kept = 0, None

    def forward(self, x: Tensor) -> Tensor:
        self.calls, self.kept = self.calls + 1, super().forward(x)
        return self.kept


def deep() -> nn.Module:
    return nn.Sequential(nn.Sequential(*[nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(8)]))


USED: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
    "a parameter that is written to": WritesParameter,
    "state": Keeps,
    "repeated blocks": deep,
    "a lock": WithLock,
    "a partial forward": partial_forward,
}


def state(module: nn.Module) -> dict[str, Any]:
    """Everything that an audit could change: tensors and their identities, structure, mode, plain attributes."""
    plain = {f"{n}.{k}": v for n, m in module.named_modules() for k, v in vars(m).items() if not k.startswith("_")}
    ids = [id(m) for m in module.modules()] + [id(p) for p in (*module.parameters(), *module.buffers())]
    return {"ids": ids, "plain": {k: v for k, v in plain.items() if not isinstance(v, Tensor)}}


@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
@pytest.mark.parametrize("build", USED.values(), ids=list(USED))
def test_an_audit_never_changes_the_users_module(build: Callable[[], nn.Module], training: bool) -> None:
    module = build().train()
    tensors = {k: v.clone() for k, v in module.state_dict().items()}
    before = state(module)
    deadweight.audit(module, X, training=training)
    assert state(module) == before
    assert all(torch.equal(v, tensors[k]) for k, v in module.state_dict().items())
    assert all(type(p) is nn.Parameter and p.grad is None for p in module.parameters())


def test_repeated_blocks_of_a_live_module_are_cut_in_a_copy() -> None:
    module = deep()
    source = open_model(module, inputs=X, collapsed=True)
    assert source.blocks[0].path == "0" and len(source.module[0]) == source.blocks[0].kept < 8 == len(module[0])
    assert source.module[0][0][1].weight is module[0][0][1].weight


def test_tensors_that_a_forward_keeps_are_named() -> None:
    assert any("stores tensors in the module (kept)" in note for note in deadweight.audit(Keeps(), X).notes)
    assert deadweight.audit(Base(), X).notes == ()


def test_a_weight_that_a_hook_computes_anew_is_not_kept() -> None:
    with pytest.warns(FutureWarning):
        module = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)), nn.LayerNorm(4))
    result = deadweight.audit(module, X)
    assert result.notes == () and result.untraced is None


@pytest.mark.parametrize("build", [Base, WithLock, deep], ids=["plain", "lock", "deep"])
def test_a_copy_of_tensors_shares_none_and_a_copy_of_structure_shares_all(build: Callable[[], nn.Module]) -> None:
    module = build()
    own = {id(p) for p in module.parameters()}
    assert not own & {id(p) for p in copy_tensors(module).parameters()}
    assert own == {id(p) for p in share_tensors(module).parameters()}


def test_a_rebuilt_module_keeps_ties_and_binds_methods_to_itself() -> None:
    module = Base()
    module.again, module.method = module.linear, module.linear.forward
    clone = rebuilt(module, torch.clone, {})
    assert clone.again is clone.linear is not module.linear and clone.method.__self__ is clone.linear
    torch.testing.assert_close(clone(X), module(X))
