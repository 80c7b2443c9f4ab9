"""Every command and setting of docs/lint.md runs as it is written there, in a project that the test makes."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from deadweight.lint.settings import parse_settings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "lint.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
MODEL = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.q, self.v = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.k = nn.Linear(8, 8, bias=bias)

    def forward(self, x):
        return x + (self.q(x) @ self.k(x).mT).softmax(-1) @ self.v(x)


class Model(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList([Block(bias)])

    def forward(self, tokens):
        return self.blocks[0](self.embed(tokens))


def build():
    return Model()


def build_encoder():
    return Model(bias=False)
"""
FAILS = ("--check", "--fail-on dead", "--select key-bias,value-bias --check")  # the key bias is dead


def blocks(language: str, page: str = PAGE) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.M | re.S)


def commands(page: str) -> list[str]:
    lines = [line for block in blocks("", page) for line in block.splitlines()]
    return [re.split(r"  +", line)[0] for line in lines if line.startswith("deadweight audit mypkg")]


@pytest.fixture
def mypkg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "mypkg").mkdir()
    (tmp_path / "mypkg" / "__init__.py").write_text("")
    (tmp_path / "mypkg" / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("mypkg", "mypkg.model"):
        sys.modules.pop(name, None)


def test_the_commands_of_the_page_and_of_readme_run_in_their_order(mypkg: Path, run) -> None:
    written = commands(PAGE) + commands(README)
    assert len(written) == 11
    for command in written:
        code, out, err = run(*shlex.split(command)[1:])
        assert code == int(command.endswith(FAILS)), f"{command}\n{out}\n{err}"


def test_the_settings_of_the_page_are_settings_and_check_both_targets(mypkg: Path, run) -> None:
    (text,) = blocks("toml")
    settings = parse_settings(tomllib.loads(text)["tool"]["deadweight"], mypkg)
    assert len(settings.targets) == 2 and settings.accept[0].reason == "released checkpoints have it"
    (mypkg / "pyproject.toml").write_text(text)
    assert "expected one: name its MODEL" in run("audit", "--html", "page.html")[2], "one page is about one model"
    code, _, err = run("audit", "--update-baseline")
    assert code == 0, err
    assert json.loads((mypkg / "known.json").read_text())["findings"] == [], "what is accepted is not listed"
    assert run("audit")[0] == 0
    (mypkg / "pyproject.toml").write_text(text.replace("blocks.*.k.bias", "blocks.*.q.bias"))
    assert run("audit")[0] == 1


@pytest.mark.slow  # the fixture is tried in test_where_people_lint.py
def test_the_test_of_the_page_fails_for_the_dead_bias_and_passes_without(mypkg: Path) -> None:
    test = next(block for block in blocks("python") if "assert_no_deadweight" in block)
    head = "import torch\nfrom mypkg.model import {} as build_model\ntokens = torch.zeros(2, 5, dtype=torch.long)\n"
    for build, status in (("build", 1), ("build_encoder", 0)):
        (mypkg / "test_model.py").write_text(head.format(build) + test)
        pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        done = subprocess.run(pytest_, cwd=mypkg, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stdout


def test_the_hook_and_the_inputs_of_the_action_exist() -> None:
    config, action = map(yaml.safe_load, blocks("yaml"))
    known = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    assert [hook["id"] for hook in config["repos"][0]["hooks"]] == [hook["id"] for hook in known]
    inputs = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))["inputs"]
    assert set(action[0]["with"]) <= set(inputs)


def test_the_callbacks_of_the_page_are_imported_as_it_says() -> None:
    code = next(block for block in blocks("python") if "AuditCallback" in block)
    made: dict[str, object] = {"Trainer": lambda *_, callbacks: callbacks}
    exec(compile(code, "docs/lint.md", "exec"), made)
    (callback,) = made["trainer"]  # type: ignore[misc]
    assert callback.action == "stop"
