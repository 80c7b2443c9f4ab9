"""What a release says about itself agrees: version, changelog, citation, and the README in two languages."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import deadweight
from deadweight.cli.main import REQUIRED

ROOT = Path(__file__).parents[1]
ENGLISH, CHINESE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md"))
NUMBER = re.compile(r"(?<![\w.,-])\d+(?:[.,]\d+)*(?:e[-+]?\d+)?(?![\w-])")


def blocks(text: str) -> list[str]:
    return re.findall(r"^```\w*\n.*?^```$", text, re.M | re.S)


def outside(text: str) -> str:
    return re.sub(r"^```\w*\n.*?^```$", "", text, flags=re.M | re.S)


def commands(text: str) -> list[str]:
    return sorted(" ".join(code.split()) for code in re.findall(r"`([^`]+)`", outside(text)))


def numbers(text: str) -> list[str]:
    prose = re.sub(r"\]\([^)]*\)|`[^`]*`", " ", outside(text))
    return sorted(
        NUMBER.findall(re.sub(r"(?<=[\u4e00-\u9fff，。；：（])(?=\d)|(?<=\d)(?=[\u4e00-\u9fff])", " ", prose))
    )


def links(text: str) -> list[str]:
    return sorted(link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("README"))


@pytest.mark.parametrize("part", [blocks, commands, numbers, links])
def test_the_readmes_have_the_same(part) -> None:
    assert part(CHINESE) == part(ENGLISH)


def test_the_readmes_link_each_other_and_have_as_many_headings() -> None:
    assert "](README.zh.md)" in ENGLISH and "](README.md)" in CHINESE
    shape = [re.findall(r"^(#+) ", outside(text), re.M) for text in (ENGLISH, CHINESE)]
    assert shape[0] == shape[1]


def test_a_number_that_only_one_readme_has_is_noticed() -> None:
    assert numbers(CHINESE.replace("1.38 倍", "1.39 倍")) != numbers(ENGLISH)


def test_the_citation_has_the_version_of_the_package_and_the_date_of_the_changelog() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == deadweight.__version__
    assert {"cff-version", "message", "title", "authors", "license"} <= set(citation)
    heading = re.search(r"^## (\S+) \(([^)]+)\)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert heading is not None and heading[1] == deadweight.__version__
    assert str(citation.get("date-released", "unreleased")) == heading[2]


def test_what_the_command_asks_for_when_it_is_missing_is_what_pyproject_requires() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = {
        re.split(r"[<>=\[; ]", entry)[0]
        .replace("-", "_")
        .replace("pyyaml", "yaml")
        .replace("markdown_it_py", "markdown_it")
        for entry in project["dependencies"]
    }
    assert required >= REQUIRED
    assert required - REQUIRED <= {"typer", "rich"}, "without these there is no command line to say it"


def test_an_extra_that_a_message_names_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    named = {
        name
        for file in [*(ROOT / "src").rglob("*.py"), ROOT / "README.md", ROOT / "tests" / "conftest.py"]
        for name in re.findall(r"(?:deadweight|\")?\.?\[(\w+)\](?=\"?\W)", " ".join(install_lines(file)))
    }
    assert {"train", "plot", "cluster", "real"} <= named <= set(extras)


def install_lines(file: Path) -> list[str]:
    return [line for line in file.read_text(encoding="utf-8").splitlines() if "pip install" in line]


@pytest.fixture(scope="module")
def release_check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release_check", ROOT / "scripts" / "release_check.py")
    assert spec is not None and spec.loader is not None
    sys.modules["release_check"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist, built from a copy, without fetching anything."""
    for name in ("build", "setuptools"):
        pytest.importorskip(name, reason=f"{name} is not installed: make setup")
    copy, out = tmp_path_factory.mktemp("release") / "copy", tmp_path_factory.mktemp("dist")
    left_out = shutil.ignore_patterns(".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, copy, ignore=left_out)
    command = (sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return out


def test_the_wheel_is_complete_and_small(built: Path, release_check: ModuleType) -> None:
    (wheel,) = built.glob("*.whl")
    release_check.check_wheel(wheel)


def test_a_wheel_that_lacks_a_file_is_noticed(
    built: Path, release_check: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    (wheel,) = built.glob("*.whl")
    monkeypatch.setattr(release_check, "MUST_HAVE", ("deadweight/not_there.py",))
    with pytest.raises(SystemExit, match=r"lacks \['deadweight/not_there.py'\]"):
        release_check.check_wheel(wheel)


def test_the_sdist_holds_what_the_tests_read(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for needed in ("action.yml", ".pre-commit-hooks.yaml", "mkdocs.yml", "docs/index.md", "tests/test_release.py"):
        assert needed in names
