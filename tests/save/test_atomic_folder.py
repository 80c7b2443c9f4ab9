"""OUT appears complete or not at all, whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deadweight.errors import DeadweightError
from deadweight.save.atomic_folder import check_space, complete_or_absent


def leftovers(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_folder_appears_when_it_is_complete(tmp_path: Path) -> None:
    with complete_or_absent(tmp_path / "out") as draft:
        (draft / "a").write_text("x")
        assert not (tmp_path / "out").exists()
    assert leftovers(tmp_path) == ["out"] and (tmp_path / "out" / "a").read_text() == "x"


@pytest.mark.parametrize("error", [DeadweightError("no"), KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_a_failure_leaves_no_folder_behind(tmp_path: Path, error: BaseException) -> None:
    expected = DeadweightError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected), complete_or_absent(tmp_path / "out") as draft:
        (draft / "a").write_text("x")
        raise error
    assert leftovers(tmp_path) == []


def test_an_existing_folder_stays_without_overwrite(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    with pytest.raises(DeadweightError, match="exists"), complete_or_absent(tmp_path / "out"):
        pass
    with pytest.raises(DeadweightError), complete_or_absent(tmp_path / "out", overwrite=True):
        raise DeadweightError("no")
    assert (tmp_path / "out" / "precious").exists()
    with complete_or_absent(tmp_path / "out", overwrite=True) as draft:
        (draft / "new").write_text("x")
    assert leftovers(tmp_path) == ["out"] and leftovers(tmp_path / "out") == ["new"]


def test_a_disk_without_room_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(DeadweightError, match="free"):
        check_space(tmp_path / "out", 1 << 60)


KILLED = """
import sys, time
from pathlib import Path
from deadweight.save.atomic_folder import complete_or_absent
with complete_or_absent(Path(sys.argv[1])) as draft:
    for i in range(1000):
        (draft / str(i)).write_bytes(b"x" * 1000)
        print(i, flush=True)
        time.sleep(0.001)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_killed_process_leaves_no_out(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path / "out")], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "out").exists()
    assert all(name.startswith(".out.part-") for name in leftovers(tmp_path))
