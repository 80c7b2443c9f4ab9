"""Every command line of README, of the pages of docs, of the laws and of the help texts runs.

Names that stand for something (MODEL, OUT, book.txt) become small files that a test makes, and options that only limit
the work are added (fewer steps, fewer windows). Pages that show what a command prints have tests of their own:
tests/test_pages_run.py and tests/lint/test_page.py. tests/train and tests/compress launch torchrun.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers

import deadweight

ROOT = Path(__file__).parents[1]
ELSEWHERE = ("start.md", "lint.md", "proof-walk.md", "api.md")  # pages whose own tests run them; so are the tutorials
FILES = (
    ROOT / "README.md",
    *sorted(page for page in (ROOT / "docs").glob("*.md") if page.name not in ELSEWHERE),
    *sorted((ROOT / "src" / "deadweight" / "laws" / "pages").glob("*.md")),
)
HELP = sorted((ROOT / "src" / "deadweight" / "cli").glob("*.py"))
COMMANDS = ("audit", "reduce", "verify", "compress", "evaluate", "train", "sweep", "allocate", "saturation", "explain")
NAMES = {  # what a placeholder stands for here
    "MODEL": "demo",
    "ORIGINAL": "demo",
    "YOUR_MODEL": "demo",
    "gpt2": "demo",
    "ENCODER": "encoder",
    "FILE": "book.txt",
    "CODE": "DW002",
    "slim": "OUT",
    "./original": "demo",
    "./fused": "reduced",
    "RESULT": "reduced",
}
FEWER = {  # options that limit the work; the last of two counts
    "compress": "--windows 4 --length 64",
    "train": "--steps 2",
    "evaluate": "--bytes 2048",
    "saturation": "--windows 2",
}
ALONE = ("deadweight audit", "deadweight explain")  # all others are names of commands in a sentence
READS_OUT = ("verify", "evaluate")  # the other commands write it
MAY_FAIL = ("--check", "--fail-on", "--baseline", "--output-format")  # exit status 1: the model has a dead bias
MODULE = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, tokens):
        x = self.embed(tokens)
        return (self.q(x) @ self.k(x).mT).softmax(-1) @ self.v(x)


def build():
    return Model()


def before():
    torch.manual_seed(0)
    return Model()


after = before
"""
RUN = "[model]\nd_model = 16\nn_layers = 1\ncontext = 16\n[train]\nsteps = 2\n"
GRID = f'{RUN}[grid]\n"train.weight_decay" = [0.1, 0.03]\n'


def command_lines(text: str) -> Iterator[str]:
    """The commands of a text, each without the words that explain it."""
    for line in re.findall(rf"(?:^[ $]*|`)(deadweight (?:{'|'.join(COMMANDS)})\b[^`\n]*)", text, re.M):
        command = re.split(r"  +|, or the word", line)[0].split(" # ")[0].strip()
        alone = len(command.split()) == 2 and command not in ALONE
        if not alone and "--json," not in line and "…" not in command:
            yield command


def documented() -> list[str]:
    return sorted({c for file in (*FILES, *HELP) for c in command_lines(file.read_text(encoding="utf-8"))})


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the commands name."""
    folder = tmp_path_factory.mktemp("material")
    deadweight.reduce("demo", folder / "reduced")
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48, vocab_size=256
    )
    transformers.BertForMaskedLM(config).save_pretrained(folder / "encoder")
    shutil.copy(folder / "encoder" / "config.json", folder / "config.json")
    text = "".join(f"Line {i} of a book says that {i * i} is the square of {i}.\n" for i in range(600))
    for name in ("book.txt", "other.txt"):
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "grid.toml").write_text(GRID, encoding="utf-8")
    for name in ("run.toml", "plan.toml"):
        (folder / name).write_text(RUN, encoding="utf-8")
    (folder / "mypkg").mkdir()
    (folder / "mypkg" / "__init__.py").touch()
    (folder / "mypkg" / "model.py").write_text(MODULE, encoding="utf-8")
    target = '[tool.deadweight]\ntargets = [{ model = "mypkg.model:build", inputs = "2x6:int" }]\n'
    (folder / "pyproject.toml").write_text(target, encoding="utf-8")
    return folder


@pytest.fixture
def workplace(material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    shutil.copytree(material, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("mypkg", "mypkg.model"):
        sys.modules.pop(name, None)


def in_small(command: str) -> list[str]:
    """The words of a command as they are run here."""
    words = [NAMES.get(word, word) for word in shlex.split(command)[1:]]
    if words[0] in READS_OUT:
        words = ["reduced" if word == "OUT" else word for word in words]
    words += shlex.split(FEWER.get(words[0], ""))
    if words[0] == "train" and "--config" not in words:
        words += ["--width", "16", "--layers", "1", "--context", "16"]
    if words[0] == "compress" and "--heal" in words:
        words += ["--heal", "2"]
    if words[:2] == ["allocate", "plan"]:
        words += ["--pilot-steps", "2"]
    if "s.json" in words and words[0] == "allocate":
        words += ["--layers", "4"]  # as many as the demo has
    return words


def test_the_command_lines_are_found() -> None:
    commands = documented()
    for known in (
        "deadweight audit mypkg.model:build --fail-on dead",
        "deadweight compress MODEL OUT --max-loss 0.01",
        "deadweight allocate plan --saturation pilot --toml plan.toml",
        "deadweight train OUT --query identity",
    ):
        assert known in commands
    assert {command.split()[1] for command in commands} == set(COMMANDS)


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in documented() if "--ray" not in c])
def test_a_documented_command_runs(command: str, workplace: Path, run) -> None:
    words = in_small(command)
    if words[0] == "allocate" and "s.json" in words:
        run("saturation", "demo", "--windows", "2", "--json", "s.json")
    status, out, err = run(*words)
    allowed = (0, 1) if any(option in command for option in MAY_FAIL) else (0,)
    assert status in allowed, out + err
    assert out.strip(), "it says nothing"
