"""What a release says about itself agrees: version, changelog, citation, and the README in two languages."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

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
