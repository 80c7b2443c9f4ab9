"""The first page, the tutorials, the walk through a proof and the API reference do what they show.

A block with a title is a file. A `console` block holds commands and parts of what they print, in order: "…" stands for
anything, and numbers like 9.0e-15 for any of that form, since rounding differs between machines. A `pycon` block is a
doctest. Blocks of one page share a folder.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from deadweight.cli import main

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = ["start.md", "proof-walk.md", "api.md", *(f"tutorials/{name}.md" for name in ("lint", "smaller", "design"))]
BLOCK = re.compile(r"^```(?P<kind>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^```$", re.M | re.S)
PORT = "8000"  # what pages write; a test uses a free one
LONGEST = 300  # seconds that a reader with one core waits for a page; pages say two or three minutes
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass
class Shell:
    """Runs the commands of a page in its folder. `deadweight` runs in this process, which saves its imports."""

    folder: Path
    port: int
    status: int = 0
    modules: set[str] = field(default_factory=set)
    servers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text, encoding="utf-8")
        self.modules.add(Path(name).stem)

    def run(self, command: str) -> str:
        """What the command prints. A failure must be asked for by the next command, `echo $?`."""
        if command == "echo $?":
            status, self.status = self.status, 0
            return str(status)
        assert self.status == 0, f"exit status {self.status} before {command!r}"
        words = shlex.split(command.replace(PORT, str(self.port)))
        if words[0] == "deadweight":
            return self.run_deadweight(words)
        if words[-1] == "&":
            return self.start_server(words[:-1])
        return self.run_program(words)

    def run_deadweight(self, words: list[str]) -> str:
        for name in self.modules:
            sys.modules.pop(name, None)  # a file may have been written again
        output = io.StringIO()
        argv, sys.argv = sys.argv, words
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()) as errors:
                main()
            self.status = 0
        except SystemExit as end:
            self.status = int(end.code or 0)
        finally:
            sys.argv = argv
        assert self.status in (0, 1), errors.getvalue()
        return output.getvalue()

    def run_program(self, words: list[str]) -> str:
        program = sys.executable if words[0] == "python" else shutil.which(words[0])
        if program is None:
            pytest.skip(f"this page needs {words[0]}")
        done = subprocess.run([program, *words[1:]], cwd=self.folder, capture_output=True, text=True, check=False)
        self.status = done.returncode
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start_server(self, words: list[str]) -> str:
        assert words[0] == "python"
        self.servers.append(subprocess.Popen([sys.executable, *words[1:]], cwd=self.folder))
        for _ in range(600):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return ""
            assert self.servers[-1].poll() is None, "the server ended"
            time.sleep(0.1)
        raise AssertionError("the server did not start within a minute")


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a file written twice in one second must be read again
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    made = Shell(tmp_path, port)
    yield made
    for server in made.servers:
        server.terminate()
        server.wait()
    for name in made.modules:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_what_its_commands_print(page: str, shell: Shell) -> None:
    before = processor_seconds()
    run_page((DOCS / page).read_text(encoding="utf-8"), page, shell)
    assert processor_seconds() - before < LONGEST


def processor_seconds() -> float:
    """Of this process and of those that it started and that have ended."""
    return sum(os.times()[:4])


def run_page(text: str, name: str, shell: Shell) -> None:
    names: dict[str, object] = {}
    for block in BLOCK.finditer(text):
        if block["title"]:
            shell.write(block["title"], block["text"])
        elif block["kind"] == "console":
            for command, shown in commands(block["text"]):
                expect_lines(shown, shell.run(command), command)
        elif block["kind"] == "pycon":
            run_doctest(block["text"], names, name)
    assert shell.status == 0


def commands(text: str) -> list[tuple[str, list[str]]]:
    """Every command of a block, with the lines that the page shows below it."""
    parts = re.split(r"^\$ ", text, flags=re.M)
    assert parts[0] == "", "a console block begins with a command"
    return [(lines[0], lines[1:]) for lines in (part.strip().split("\n") for part in parts[1:])]


def expect_lines(shown: list[str], output: str, command: str) -> None:
    """Every shown line is a part of what was printed, in order. White space does not count."""
    printed = re.sub(r"\s+", "", output)
    place = 0
    for line in shown:
        match = re.compile(pattern(line)).search(printed, place)
        assert match, f"{command!r} does not print {line!r} behind the line before it:\n{output}"
        place = match.end()


def pattern(line: str) -> str:
    """A shown line as a regular expression."""
    parts = re.split(r"(…|\d\.\de[-+]\d\d)", re.sub(r"\s+", "", line))
    wild = {"…": ".*?"}
    return "".join(wild.get(p, r"\d\.\de[-+]\d\d") if i % 2 else re.escape(p) for i, p in enumerate(parts))


def run_doctest(text: str, names: dict[str, object], page: str) -> None:
    test = doctest.DocTestParser().get_doctest(text, names, page, page, 0)
    runner, report = doctest.DocTestRunner(optionflags=FLAGS), io.StringIO()
    runner.run(test, out=report.write, clear_globs=False)
    names.update(test.globs)
    assert runner.summarize(verbose=False).failed == 0, report.getvalue()


def test_a_line_that_is_not_printed_is_noticed(shell: Shell) -> None:
    page = "```console\n$ deadweight explain\nDW002  key-bias\n```\n"
    run_page(page, "page", shell)
    with pytest.raises(AssertionError, match="does not print 'DW099'"):
        run_page(page.replace("DW002  key-bias", "DW099"), "page", shell)


def test_an_exit_status_that_is_not_shown_is_noticed(shell: Shell) -> None:
    shell.write("net.py", "from torch import nn, ones\ndef build():\n    return Net(), (ones(2, 3),)\n" + NET)
    page = "```console\n$ deadweight audit net:build --check\n```\n"
    with pytest.raises(AssertionError):
        run_page(page, "page", shell)
    run_page(page + "```console\n$ echo $?\n1\n```\n", "page", Shell(shell.folder, shell.port, modules={"net"}))


NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.read, self.unused = nn.Linear(3, 2), nn.Linear(3, 2)
    def forward(self, x):
        return self.read(x).tanh()
"""


def test_a_doctest_that_fails_is_noticed() -> None:
    run_doctest(">>> 1 + 1\n2\n", {}, "page")
    with pytest.raises(AssertionError):
        run_doctest(">>> 1 + 1\n3\n", {}, "page")
