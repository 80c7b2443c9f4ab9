"""The pages of the laws: what `deadweight explain` shows and what `--select` accepts. Read without importing torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from deadweight.errors import DeadweightError

Name = tuple[str, str]  # the code of a law and its name
_TITLE = re.compile(r"# (?P<code>DW\d{3}) (?P<law>[a-z-]+): (?P<title>.+)")


@dataclass(frozen=True)
class Page:
    """One law, for people: its first line is `# CODE law: title`, its first paragraph the law in a sentence."""

    code: str
    law: str
    title: str
    summary: str
    remedy: str  # first paragraph under "What to do", in one line
    markdown: str


@cache
def pages() -> tuple[Page, ...]:
    """All pages that are stored, by code."""
    return read_pages(files("deadweight").joinpath("laws", "pages"))


def read_pages(folder: Traversable) -> tuple[Page, ...]:
    """The pages of a folder, by code; other files are left out."""
    texts = {item.name: item.read_text(encoding="utf-8") for item in folder.iterdir() if item.name.endswith(".md")}
    return tuple(parse_page(name, texts[name]) for name in sorted(texts))


def stored_page(code: str) -> Page:
    """The page of a law that is stored."""
    return next(page for page in pages() if page.code == code)


def find_page(word: str, among: Sequence[Page] | None = None) -> Page:
    """The page of a law, by its code or its name, in any case; `among` all that are stored unless others are given."""
    known = pages() if among is None else among
    code = find_code(word, names(known))
    return next(page for page in known if page.code == code)


def law_codes(given: str | Sequence[str] | None, among: Sequence[Name] | None = None) -> tuple[str, ...] | None:
    """Codes from what was typed after `--select`: codes or law names, separated by commas; nothing typed is None.

    They are chosen `among` all laws of the package unless others are given.
    """
    words = [given] if isinstance(given, str) else list(given or ())
    typed = [word for words_ in words for word in words_.split(",") if word.strip()]
    if words and not typed:
        raise DeadweightError(f"found {words[0]!r} where laws were to be named; expected codes like DW002 or law names")
    known = names(pages()) if among is None else among
    return tuple(find_code(word, known) for word in typed) or None


def names(of: Sequence[Page]) -> list[Name]:
    return [(page.code, page.law) for page in of]


def find_code(word: str, known: Sequence[Name]) -> str:
    """The code of a law, by its code or its name, in any case."""
    for name in known:
        if word.strip().lower() in map(str.lower, name):
            return name[0]
    raise DeadweightError(f"no law is called {word!r}: {_suggestion(word, known)}")


def parse_page(name: str, text: str) -> Page:
    """A page from its Markdown."""
    head, _, rest = text.partition("\n")
    match = _TITLE.fullmatch(head)
    assert match is not None, f"{name} must begin with '# DWnnn law-name: title', found {head!r}"
    _, _, remedy = rest.partition("\n## What to do\n")
    return Page(match["code"], match["law"], match["title"], _paragraph(rest), _paragraph(remedy), text)


def _paragraph(text: str) -> str:
    """The first paragraph, in one line."""
    return " ".join(text.strip().partition("\n\n")[0].split())


def _suggestion(word: str, known: Sequence[Name]) -> str:
    spelled = {text.lower(): text for name in known for text in name}
    close = [spelled[c] for c in difflib.get_close_matches(word.strip().lower(), spelled, n=2)]
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return f"{hint}`deadweight explain` lists all {len(known)} laws"
