"""The callback of Lightning audits once, before the first step."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from deadweight.callbacks.once import DeadweightWarning
from deadweight.errors import DeadweightError

lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

from deadweight.callbacks.lightning import AuditCallback  # noqa: E402 - it needs what the line above looks for

Fit = Callable[..., list[float]]


@pytest.fixture
def fit(attention, rows: list[dict[str, Tensor]], tmp_path) -> Fit:
    class Module(lightning.LightningModule):
        def __init__(self, bias: bool) -> None:
            super().__init__()
            self.inner, self.losses = attention(bias=bias), []

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

        def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
            loss = torch.nn.functional.cross_entropy(self(batch[0]), batch[1])
            self.losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    def run(bias: bool, *callbacks: AuditCallback) -> list[float]:
        """Three steps; their losses."""
        module = Module(bias)
        torch.manual_seed(0)
        trainer = lightning.Trainer(
            max_steps=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=list(callbacks), default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(module, DataLoader([(r["x"], r["labels"]) for r in rows], batch_size=4, shuffle=True))
        return module.losses

    return run


def test_a_dead_bias_is_warned_about_and_the_losses_are_the_same(fit: Fit) -> None:
    callback = AuditCallback()
    with pytest.warns(DeadweightWarning, match=r"8 numbers of Module cannot learn; DW002 key-bias: inner.k.bias"):
        audited = fit(True, callback)
    assert callback.result is not None and len(audited) == 3
    assert audited == fit(True)


def test_training_stops_before_the_first_step_if_asked_to(fit: Fit) -> None:
    with pytest.raises(DeadweightError, match="build the key projection with bias=False"):
        fit(True, AuditCallback("stop"))


def test_a_model_without_dead_parameters_trains_without_a_word(fit: Fit) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeadweightWarning)
        assert len(fit(False, AuditCallback("stop"))) == 3


def test_without_lightning_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] in ("lightning", "pytorch_lightning")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.setitem(sys.modules, "pytorch_lightning", None)
    monkeypatch.delitem(sys.modules, "deadweight.callbacks.lightning")
    with pytest.raises(DeadweightError, match="pip install lightning"):
        __import__("deadweight.callbacks.lightning")
