"""Pages of the site that are made from other files: laws, results, pages of the root, and sources that pages name.

MkDocs calls `on_config` and `on_files` (see mkdocs.yml). Everything comes from the package and from files of the root;
nothing is stored twice.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from deadweight.laws.page import Page, pages

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from catalogue_pages import make_pages
from catalogue_record import Record
from law_pictures import draw_law

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[1]
EVERY_LAW = "every law"  # the entry of the navigation where the laws go
RESULTS = "## Are the proofs right"  # where the index turns from pages to results
PROJECT = {
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "LOG.md": "project/log.md",
    "README.md": "start.md",  # a link to README leads to the first page
}  # files of the root, and where the site has them
LANGUAGES = {".py": "python", ".json": "json", ".toml": "toml", ".md": "markdown"}
CATALOGUE = "benchmarks/results/catalogue.json.gz"
LARGEST = 200_000  # characters of a file that is shown whole
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)#:\s]+)(?P<anchor>#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put every law into the navigation."""
    assert config.nav is not None
    config.nav = replace_entry(config.nav)
    return config


def replace_entry(nav: list) -> list:
    """The navigation with the laws in place of the entry that stands for them."""
    entries: list = []
    for entry in nav:
        if entry == EVERY_LAW:
            entries += [{f"{page.code} {page.law}": f"laws/{page.code}.md"} for page in pages()]
        elif isinstance(entry, dict):
            entries.append({k: replace_entry(v) if isinstance(v, list) else v for k, v in entry.items()})
        else:
            entries.append(entry)
    return entries


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here, and the sources that some page links to."""
    from mkdocs.structure.files import File

    made = made_pages()
    for file in files.documentation_pages():
        made.setdefault(file.src_uri, resolve_links(file.content_string, ROOT / "docs" / file.src_uri, file.src_uri))
    for text in list(made.values()):
        for name in re.findall(r"\(((?:\.\./)*source/[^)#]+)\.md", text):
            inside = name[name.index("source/") :]
            made[f"{inside}.md"] = source_page(ROOT / inside.removeprefix("source/"))
    for uri, text in made.items():
        if (stored := files.get_file_from_path(uri)) is not None:
            files.remove(stored)
        files.append(File.generated(config, uri, content=text))
    for name, text in make_pages(Record.load(ROOT / CATALOGUE)).items():  # plain HTML, copied as it is
        files.append(File.generated(config, f"catalogue/{name}", content=text))
    return files


def made_pages() -> dict[str, str]:
    """Address on the site, and text, of every page that is made from other files."""
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    made = {f"laws/{page.code}.md": law_page(page) for page in pages()}
    made |= split_index(resolve_links(index, ROOT / "docs" / "index.md", "index.md"))
    laws = resolve_links((ROOT / "docs" / "laws.md").read_text(encoding="utf-8"), ROOT / "docs" / "laws.md", "laws.md")
    made["laws.md"] = re.sub(r"^\| (DW\d{3}) \|", r"| [\1](laws/\1.md) |", laws, flags=re.M)
    catalogue = (ROOT / "docs" / "catalogue.md").read_text(encoding="utf-8")
    made["catalogue.md"] = catalogue.replace("`catalogue/index.html`", "[open it](catalogue/index.html)")
    for name, uri in PROJECT.items():
        if uri.startswith("project/"):
            made[uri] = resolve_links((ROOT / name).read_text(encoding="utf-8"), ROOT / name, uri)
    return made


def law_page(page: Page) -> str:
    """The page of a law, with its picture behind the sentence that states it, and links to the laws that it names."""
    title, _, rest = page.markdown.partition("\n")
    sentence, _, sections = rest.strip().partition("\n\n")
    picture = draw_law(page.code)
    figure = f'<figure class="law" markdown="0">\n{picture}\n</figure>\n\n' if picture else ""
    known = {p.code for p in pages()} - {page.code}
    sections = re.sub(r"\bDW\d{3}\b", lambda m: f"[{m[0]}]({m[0]}.md)" if m[0] in known else m[0], sections)
    return f"{title}\n\n{sentence}\n\n{figure}{sections}\n"


def split_index(text: str) -> dict[str, str]:
    """The index as two pages: what there is to read, and every result with its verdict."""
    home, mark, results = text.partition(RESULTS)
    assert mark, f"docs/index.md has no heading {RESULTS!r}"
    shown = (ROOT / "README.md").read_text(encoding="utf-8").split("```")[1].strip()
    home = home.replace("\n## ", f"\n```text\n{shown}\n```\n\n## ", 1)
    head = (
        "# Results\n\nEvery benchmark and study: its question, its verdict, its main number. Each page is written by a "
        "script from a record, so that its numbers can be measured again. What they mean for somebody who designs a "
        "model: [What the studies mean](choices.md).\n\n"
    )
    return {"index.md": home, "results.md": head + mark + results}


def resolve_links(text: str, page: Path, uri: str) -> str:
    """The text with its links as the site needs them: a page at `uri` that is stored as `page`."""

    def resolve(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(page.parent / match["target"]))
        if not target.is_relative_to(ROOT) or not target.exists():
            return match[0]
        link = os.path.relpath(address(target.relative_to(ROOT)), PurePosixPath(uri).parent)
        words = title_of(target) if match["text"] == match["target"] else match["text"]
        return f"[{words}]({link}{match['anchor'] or ''})"

    return _LINK.sub(resolve, text)


def title_of(file: Path) -> str:
    """The first heading of a page; the name of any other file."""
    heading = re.match(r"# (.+)", file.read_text(encoding="utf-8")) if file.suffix == ".md" else None
    return heading[1] if heading else file.name


def address(file: Path) -> str:
    """Where the site has a file of the repository."""
    name = file.as_posix()
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    return PROJECT.get(name, f"source/{name}.md")


def source_page(file: Path) -> str:
    """A page that shows a file of the repository, or lists a folder."""
    name = file.relative_to(ROOT).as_posix()
    if file.is_dir():
        return f"# {name}\n\n" + "\n".join(f"- `{item.name}`" for item in sorted(file.iterdir())) + "\n"
    text = file.read_text(encoding="utf-8")
    shown = text if len(text) <= LARGEST else text[:LARGEST] + "\n…\n"
    return f"# {name}\n\n~~~~{LANGUAGES.get(file.suffix, 'text')}\n{shown}\n~~~~\n"
