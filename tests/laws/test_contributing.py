"""The law and the tests that CONTRIBUTING shows run as they are written there, without the law that says the same."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import deadweight
from deadweight.laws.catalogue import Catalogue, every_law

CONTRIBUTING = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^   ```python\n(.*?)^   ```", CONTRIBUTING, re.M | re.S)


def run(name: str, source: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    exec(compile(textwrap.dedent(source), f"CONTRIBUTING.md: {name}", "exec"), module.__dict__)
    return module


WITHOUT_IT = Catalogue(tuple(law for law in every_law().laws if law.title.code != "DW004"))


@pytest.fixture
def laws(monkeypatch: pytest.MonkeyPatch) -> Catalogue:
    return WITHOUT_IT.with_law(run("dw099_cancelled", BLOCKS[0], monkeypatch).LAW)


@pytest.fixture
def tests(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return run("test_cancelled", BLOCKS[1], monkeypatch)


def test_its_tests_pass_with_its_law_and_the_first_fails_without(
    laws: Catalogue, tests: ModuleType, examine: Callable[..., Any]
) -> None:
    names = [name for name in vars(tests) if name.startswith("test_")]
    assert len(names) == 2
    for name in names:
        getattr(tests, name)(partial(examine, laws=laws))
    with pytest.raises(AssertionError):
        getattr(tests, names[0])(partial(examine, laws=WITHOUT_IT))


def test_its_law_is_complete_and_can_be_carried_out(laws: Catalogue, tests: ModuleType) -> None:
    model, inputs = tests.Offset(nn.Identity()), (torch.randn(4, 8),)
    count = deadweight.audit(model, inputs, complete=True, laws=laws).completeness
    assert count is not None
    assert count.measured == count.explained == 8
    reduced = deadweight.reduce(model, layout="stock", inputs=inputs, laws=laws, select=["DW099"])
    assert [(step.code, step.saves) for step in reduced.steps] == [("DW099", 8)]


def test_its_code_and_its_numbers_are_free() -> None:
    order, rewriting = (int(n) for n in re.findall(r"order=(\d+)", BLOCKS[0]))
    assert order not in {search.order for _, search in every_law().in_search_order()}
    assert rewriting not in {law.order_of_rewriting for law in every_law().laws}
    assert "DW099" not in {law.title.code for law in every_law().laws}
