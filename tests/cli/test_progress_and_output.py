"""What a terminal shows while a command runs: progress with the time left, colours, and neither where they disturb."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deadweight.cli import app
from deadweight.cli.progress_and_output import tell_written

pty = pytest.importorskip("pty", reason="this system has no pseudo-terminals")
COLOUR = re.compile(r"\x1b\[[\d;]*m")


def on_terminal(arguments: list[str], **environment: str) -> str:
    """What a terminal of 100 columns receives from the command, standard output and standard error together."""
    ours, theirs = pty.openpty()
    variables = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "CI")}
    variables |= {"TERM": "xterm-256color", "COLUMNS": "100", **environment}
    command = [sys.executable, "-m", "deadweight", *arguments]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=variables, close_fds=True
    ) as process:
        os.close(theirs)
        received = read_all(ours)
    assert process.returncode == 0, received
    return received


def read_all(descriptor: int) -> str:
    pieces = []
    while True:
        try:
            piece = os.read(descriptor, 65536)
        except OSError:  # Linux ends a pseudo-terminal with an error
            piece = b""
        if not piece:
            os.close(descriptor)
            return b"".join(pieces).decode("utf-8", errors="replace")
        pieces.append(piece)


def test_a_terminal_gets_colours() -> None:
    assert COLOUR.search(on_terminal(["explain", "DW002"]))


def test_no_color_takes_the_colours_away() -> None:
    received = on_terminal(["explain", "DW002"], NO_COLOR="1")
    codes = {code for match in COLOUR.findall(received) for code in match[2:-1].split(";")}
    assert not {c for c in codes if c.isdigit() and 30 <= int(c) <= 49}, "bold is no colour, these are"
    assert "key-bias" in received


def test_a_dumb_terminal_gets_no_escapes() -> None:
    assert "\x1b" not in on_terminal(["explain", "DW002"], TERM="dumb")


def test_a_pipe_gets_neither_colours_nor_progress() -> None:
    command = [sys.executable, "-m", "deadweight", "audit", "demo", "--select", "key-bias"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "\x1b" not in done.stdout
    assert done.stderr == ""


def test_progress_with_the_time_left_is_shown_on_a_terminal_and_not_with_quiet(tmp_path: Path) -> None:
    train = ["train", "--width", "16", "--layers", "1", "--heads", "2", "--context", "16", "--steps", "20"]
    shown = on_terminal([*train, str(tmp_path / "loud")])
    assert re.search(r"\d+/20", shown)
    assert re.search(r"\d:\d\d:\d\d left", shown)
    quiet = on_terminal([*train, str(tmp_path / "quiet"), "--quiet"])
    assert not re.search(r"\d+/20|step \d+", quiet)
    assert "bits per byte" in quiet


def command_names() -> list[str]:
    """Every command, as it is typed."""
    names = [command.name or str(getattr(command.callback, "__name__", "")) for command in app.registered_commands]
    groups = {group.name: group.typer_instance for group in app.registered_groups}
    below = [
        f"{name} {command.name or getattr(command.callback, '__name__', '')}"
        for name, group in groups.items()
        for command in (group.registered_commands if group is not None else ())
    ]
    return [*names, *below]


@pytest.mark.parametrize("command", command_names())
def test_every_command_has_quiet(command: str) -> None:
    shown = CliRunner().invoke(app, [*command.split(), "--help"])
    assert shown.exit_code == 0
    assert "--quiet" in shown.output


def test_commands_of_groups_are_among_them() -> None:
    assert {"audit", "train", "allocate plan"} <= set(command_names())


def test_a_terminal_is_told_where_a_file_lies_and_a_pipe_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    tell_written(tmp_path / "page.html")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    tell_written(tmp_path / "other.html")
    told = capsys.readouterr()
    assert "written to" in told.err and "page.html" in told.err and "other.html" not in told.err + told.out
