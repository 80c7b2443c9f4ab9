"""A small project of somebody else: a module with a dead key bias, its pyproject.toml, and the command line."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NUMBER = itertools.count()
CODE = """
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(8, 8, bias=False)
        self.k = nn.Linear(8, 8, bias={bias})
        self.v = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return (self.q(x) @ self.k(x).mT).softmax(-1) @ self.v(x)


def build():
    return Attention(), torch.randn(2, 5, 8)
"""


@dataclass(frozen=True)
class Project:
    """A folder with one module, whose key bias is dead until it is repaired."""

    folder: Path
    name: str

    @property
    def target(self) -> str:
        return f"{self.name}:build"

    @property
    def file(self) -> Path:
        return self.folder / f"{self.name}.py"

    @property
    def key_line(self) -> int:
        lines = self.file.read_text(encoding="utf-8").splitlines()
        return next(number for number, line in enumerate(lines, start=1) if "self.k =" in line)

    def write(self, *, bias: bool = True) -> None:
        self.file.write_text(CODE.format(bias=bias), encoding="utf-8")
        sys.modules.pop(self.name, None)

    def settings(self, text: str) -> None:
        toml = text.replace("TARGET", self.target)
        (self.folder / "pyproject.toml").write_text(f"[tool.deadweight]\n{toml}\n", encoding="utf-8")

    def call(self, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
        """A command in a process of its own, with this environment's programs on the path."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **more}
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    made = Project(tmp_path, f"attention_{os.getpid()}_{next(NUMBER)}")  # modules are imported once by their name
    made.write()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # two versions of a file within one second
    return made
