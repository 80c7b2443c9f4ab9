"""The site: no dead link, no page without a way to it, no public name without documentation; and nothing is fetched."""

from __future__ import annotations

import importlib.util
import inspect
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import deadweight
import deadweight.testing
from deadweight.laws.page import pages

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


site_pages, law_pictures = script("site_pages"), script("law_pictures")


def test_every_page_of_docs_is_in_the_navigation_once() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    listed = sorted(re.findall(r"([\w/-]+\.md)", nav))
    stored = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    made = {uri for uri in site_pages.made_pages() if not uri.startswith("laws/")}
    assert listed == sorted(stored | made)
    assert site_pages.EVERY_LAW in nav


def test_every_law_takes_the_place_of_its_entry() -> None:
    nav = site_pages.replace_entry([{"Laws": ["laws.md", site_pages.EVERY_LAW]}, "index.md"])
    assert nav[1] == "index.md"
    assert [next(iter(entry.values())) for entry in nav[0]["Laws"][1:]] == [f"laws/{p.code}.md" for p in pages()]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.code)
def test_the_site_shows_all_of_a_law_and_its_picture(page) -> None:
    made = site_pages.law_page(page)
    plain = re.sub(r"\[(DW\d{3})\]\(\1\.md\)", r"\1", re.sub(r"<figure.*?</figure>\n\n", "", made, flags=re.S))
    assert " ".join(plain.split()) == " ".join(page.markdown.split())
    assert "\n\n" not in law_pictures.draw_law(page.code), "Markdown would end the picture at an empty line"
    assert "<title>" in made


def test_text_of_a_picture_fits_into_its_box() -> None:
    for code, picture in law_pictures.PICTURES.items():
        n = len(picture.boxes)
        width = (law_pictures.WIDTH - law_pictures.GAP * (n - 1)) / n
        for box in picture.boxes:
            longest = max(map(len, box.text.split("\n")))
            assert longest * 7.2 <= width + 0.5, f"{code}: {box.text!r}"
            noted = max(map(len, box.note.split("\n")))
            assert noted * 6.4 <= width + law_pictures.GAP, f"{code}: {box.note!r}"


def test_links_out_of_docs_lead_to_pages_of_the_site() -> None:
    text = (
        "[a](../CONTRIBUTING.md) [b](../src/deadweight/errors.py) [laws.md](laws.md#x) [gone](gone.md) ![i](cache.svg)"
    )
    made = site_pages.resolve_links(text, DOCS / "design.md", "design.md")
    assert made == (
        "[a](project/contributing.md) [b](source/src/deadweight/errors.py.md) [The laws](laws.md#x) [gone](gone.md) "
        "![i](cache.svg)"
    )
    root = site_pages.resolve_links("[a](docs/laws.md) [b](CHANGELOG.md)", ROOT / "LOG.md", "project/log.md")
    assert root == "[a](../laws.md) [b](changelog.md)"


def test_the_index_becomes_a_first_page_and_a_page_of_results() -> None:
    made = site_pages.made_pages()
    assert "biases.md" in made["results.md"] and "biases.md" not in made["index.md"]
    assert "deadweight audit demo" in made["index.md"]


def public_names() -> Iterator[tuple[str, object]]:
    for name in deadweight.__all__:
        thing = getattr(deadweight, name)
        if isinstance(thing, ModuleType):
            thing = getattr(import_module(f"{thing.__name__}.run"), name)
        if not isinstance(thing, str):
            yield name, thing
    yield "assert_no_deadweight", deadweight.testing.assert_no_deadweight


@pytest.mark.parametrize(
    ("name", "thing"), [*public_names()], ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_public_name_is_in_the_reference_and_has_a_docstring(name: str, thing: object) -> None:
    reference = (DOCS / "api.md").read_text(encoding="utf-8")
    assert f"\n::: {thing.__module__}.{thing.__qualname__}\n" in reference  # type: ignore[attr-defined]
    assert inspect.getdoc(thing)


def test_a_field_is_documented_by_the_comment_behind_it() -> None:
    pytest.importorskip("griffe")
    comment_of = script("field_comments").comment_of
    assert comment_of("    code: str  # a law's code") == "A law's code."
    assert comment_of("    code: str = '#'") == ""
    assert comment_of("    code: tuple[") == ""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A copy of what the site is made of, in which a test may break something."""
    pytest.importorskip("material", reason="the site needs mkdocs-material: pip install deadweight[docs]")
    pytest.importorskip("mkdocstrings")
    for name in ("docs", "scripts", "src", "benchmarks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    for file in ("mkdocs.yml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LOG.md"):
        shutil.copy(ROOT / file, tmp_path / file)
    return tmp_path


def build(site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]  # with --quiet nothing is an error
    environment = {"NO_MKDOCS_2_WARNING": "1", "PATH": "", "PYTHONPATH": str(site / "src")}
    return subprocess.run(command, cwd=site, capture_output=True, text=True, env=environment, check=False)


def test_the_site_builds_strictly_and_fetches_nothing(site: Path) -> None:
    done = build(site)
    assert done.returncode == 0, done.stdout + done.stderr
    html = {page: page.read_text(encoding="utf-8") for page in (site / "build" / "site").rglob("*.html")}
    fetched = [
        (page.name, link)
        for page, text in html.items()
        for link in re.findall(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"?(https?:[^\"\s>]+)", text)
    ]
    assert not fetched
    assert len([page for page in html if page.parent.name == "laws"]) == len(pages())
    dead = {
        (page.name, link)
        for page, text in html.items()
        if "catalogue" in page.parts  # MkDocs checks the links of its own pages
        for link in re.findall(r"href=\"([^\"#:]+)[\"#]", text)
        if not (page.parent / link).exists()
    }
    assert not dead


def test_the_search_works_from_a_folder_without_a_server(site: Path, browser) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    done = build(site)
    assert done.returncode == 0, done.stdout + done.stderr
    browser.get_log("browser")
    browser.get((site / "build" / "site" / "laws" / "DW005.html").as_uri())
    field = browser.find_element(By.CSS_SELECTOR, "input.md-search__input")
    field.click()
    field.send_keys("key bias")
    links = WebDriverWait(browser, 60).until(lambda b: b.find_elements(By.CSS_SELECTOR, ".md-search-result__link"))
    assert "laws/DW002.html" in links[0].get_attribute("href")
    assert browser.get_log("browser") == []


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda page: page.write_text(page.read_text() + "\n[gone](gone.md)\n"), "gone.md"),
        (lambda page: page.write_text(page.read_text() + "\n[gone](limits.md#nowhere)\n"), "nowhere"),
        (lambda page: (page.parent / "lost.md").write_text("# Lost\n"), "lost.md"),
    ],
    ids=["a dead link", "a dead anchor", "a page that is not in the navigation"],
)
@pytest.mark.slow
def test_the_build_ends_with(site: Path, change, complaint: str) -> None:
    change(site / "docs" / "start.md")
    done = build(site)
    assert done.returncode != 0
    assert complaint in done.stdout + done.stderr
