"""Builds the wheel and the sdist, and tries both as a user would: in new environments, away from the source.

    python scripts/release_check.py                 everything
    python scripts/release_check.py --tests none    without the tests in the new environment

Python 3.11 gets everything: torch, `deadweight demo`, the core tests. Other Pythons that are installed get what works
without torch: install, import, --help, explain, and one line that says what is missing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LARGEST = 10_000_000  # bytes of the wheel
CORE = ("cli", "test_testing.py", "laws")
MUST_HAVE = (
    "deadweight/py.typed",
    "deadweight/laws/pages/DW019.md",
    "deadweight/embedded/model/model.safetensors",
    "deadweight/compress/calibration_text/code.txt",
)
OTHERS = ("3.12", "3.13", "3.14")
WITHOUT_TORCH = ("typer", "rich")  # what the command line needs before it needs torch


@dataclass(frozen=True)
class Environment:
    """A new virtual environment."""

    folder: Path

    @classmethod
    def create(cls, python: str, folder: Path) -> Environment:
        run(python, "-m", "venv", str(folder))
        return cls(folder)

    def install(self, *what: str) -> None:
        quiet = ("--quiet", "--disable-pip-version-check")
        run(self.program("pip"), "install", *quiet, "--constraint", str(ROOT / "constraints.txt"), *what)

    def program(self, name: str) -> str:
        return str(self.folder / "bin" / name)


def run(*command: str, cwd: Path | None = None, fails: bool = False) -> str:
    """What the command prints; ends the check if it fails, or if it does not fail and should."""
    print("$", " ".join(command), flush=True)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if (done.returncode != 0) != fails:
        sys.exit(f"exit status {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return done.stdout + done.stderr


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--tests", nargs="*", default=CORE, help="Files and folders of tests/, or none.")
    options.add_argument("--skip-torch", action="store_true", help="Check only what works without torch.")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="release-") as folder:
        place = Path(folder)
        wheel, sdist = build(place / "dist")
        check_wheel(wheel)
        if not chosen.skip_torch:
            tests = [name for name in chosen.tests if name != "none"]
            try_everything(wheel, sdist, tests, place)
        for version in OTHERS:
            if (python := find_python(version)) is not None:
                try_without_torch(python, wheel, place / version)
            else:
                print(f"Python {version} is not installed here: not tried")
    print("the release installs")


def build(out: Path) -> tuple[Path, Path]:
    run(sys.executable, "-m", "build", "--outdir", str(out), cwd=ROOT)
    return next(out.glob("*.whl")), next(out.glob("*.tar.gz"))


def check_wheel(wheel: Path) -> None:
    size = wheel.stat().st_size
    names = set(zipfile.ZipFile(wheel).namelist())
    missing = [name for name in MUST_HAVE if name not in names]
    foreign = [name for name in names if not name.startswith(("deadweight/", "deadweight-"))]
    print(f"{wheel.name}: {size / 1e6:.1f} MB, {len(names)} files")
    if size > LARGEST or missing or foreign:
        sys.exit(f"the wheel has {size:,} bytes, lacks {missing} and should not have {foreign}")


def try_everything(wheel: Path, sdist: Path, tests: list[str], place: Path) -> None:
    """The wheel with torch and the training extra, then the sdist in its place."""
    environment = Environment.create(sys.executable, place / "complete")
    environment.install(f"{wheel}[train]", "pytest", "pytest-xdist", "hypothesis", "torch==2.13.0")
    shown = run(environment.program("deadweight"), "demo", cwd=place)
    if "1,878,144 parameters → 1,765,752" not in shown:
        sys.exit(f"the demo does not reduce its model:\n{shown[-2000:]}")
    if tests:
        checkout = unpack_without_source(sdist, place / "sdist")
        command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"tests/{name}" for name in tests))
        print(run(environment.program("python"), *command, cwd=checkout).strip().splitlines()[-1])
    environment.install("--no-deps", "--force-reinstall", str(sdist))
    run(environment.program("deadweight"), "explain", "DW002", cwd=place)


def unpack_without_source(sdist: Path, place: Path) -> Path:
    """The files of the sdist but for the package itself: its tests import the one that is installed."""
    with tarfile.open(sdist) as archive:
        archive.extractall(place, filter="data")
    checkout = next(place.iterdir())
    shutil.rmtree(checkout / "src")
    return checkout


def try_without_torch(python: str, wheel: Path, folder: Path) -> None:
    environment = Environment.create(python, folder)
    environment.install("--no-deps", str(wheel))
    environment.install(*WITHOUT_TORCH)
    run(environment.program("python"), "-c", "import deadweight; print(deadweight.__version__)", cwd=folder)
    for arguments in (["--help"], ["--version"], ["explain"], ["explain", "key-bias"], ["audit", "--help"]):
        run(environment.program("deadweight"), *arguments, cwd=folder)
    shown = run(environment.program("deadweight"), "audit", "demo", cwd=folder, fails=True)
    if "Traceback" in shown or "pip install" not in shown:
        sys.exit(f"without torch the command should say in one line what to install:\n{shown}")


def find_python(version: str) -> str | None:
    """A Python of this version that runs: one on the path may be a shim of a version that is not active."""
    names = [shutil.which(f"python{version}"), *Path.home().glob(f".pyenv/versions/{version}.*/bin/python")]
    for name in filter(None, names):
        if subprocess.run([str(name), "--version"], capture_output=True, check=False).returncode == 0:
            return str(name)
    return None


if __name__ == "__main__":
    main()
