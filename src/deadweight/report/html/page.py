"""Templates, and the page around every report: one file, nothing fetched, no script but its own."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup

from deadweight.laws.page import pages
from deadweight.report.text import count, one_line, percent, plural, printable
from deadweight.version import __version__

LONGEST_NAME, LONGEST_TEXT = 240, 2000  # characters; what is longer is cut in the middle
MOST_ROWS = 300  # of a table; the rest is in --json
MEANING = {
    "dead": "Changing it changes no output.",
    "folds": "Other parameters can take over its effect.",
    "gauge": "A free choice of basis or scale.",
}
LETTER = {"dead": "D", "folds": "F", "gauge": "G", "unknown": "?"}


def safe(text: str, longest: int = LONGEST_NAME) -> str:
    """Text without control and direction characters, and not longer than a page can show."""
    if len(text) > longest:
        text = f"{text[: longest // 2]}…{text[-longest // 2 :]}"
    return printable(text)


def finalize(value: object) -> object:
    """What a template puts out: any text but our own markup is made safe here, whoever wrote the template."""
    return safe(value, LONGEST_TEXT) if isinstance(value, str) and not isinstance(value, Markup) else value


@cache
def environment() -> Environment:
    made = Environment(
        loader=PackageLoader("deadweight.report.html"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=finalize,
    )
    made.filters |= {
        "count": count,
        "percent": percent,
        "plural": plural,
        "short": short_count,
        "line": one_line,
        "name": safe,
    }
    made.globals |= {"version": __version__, "meaning": MEANING, "letter": LETTER, "most_rows": MOST_ROWS}
    sheets = {"colours": "colours.css", "plots": "plots.css", "layout": "page.css", "fragment": "fragment.css"}
    made.globals |= {name: source(file) for name, file in sheets.items()}
    return made


def source(name: str) -> Markup:
    """A style sheet or script of ours, as it is."""
    loader = PackageLoader("deadweight.report.html")
    text, _, _ = loader.get_source(Environment(), name)
    assert "</script" not in text and "</style" not in text, name
    return Markup(text)


def render_page(template: str, **values: object) -> str:
    """A whole page. Its policy allows the page's own script, by its digest, and nothing from anywhere."""
    script = source("page.js")
    digest = b64encode(hashlib.sha256(str(script).encode()).digest()).decode()
    return environment().get_template(template).render(script=script, script_digest=digest, **values)


def render_part(template: str, **values: object) -> str:
    return environment().get_template(template).render(**values)


@cache
def law_page(code: str) -> Markup:
    """The page of a law as HTML, without its title; empty for a law without a stored page."""
    page = next((p for p in pages() if p.code == code), None)
    if page is None:
        return Markup("")
    body = page.markdown.partition("\n")[2].replace("\n## ", "\n### ")
    return Markup(MarkdownIt("commonmark", {"html": False}).render(body))


def short_count(n: int) -> str:
    """1.88 M for 1,878,144: three digits and a letter."""
    for size, letter in ((10**12, " T"), (10**9, " B"), (10**6, " M"), (10**3, " k")):
        if n >= size:
            return f"{n / size:.3g}{letter}"
    return str(n)


def change_text(share: float) -> str:
    """+1.20 % or −1.20 %; what rounds to nothing has no sign."""
    text = f"{abs(share):.2%}".replace("%", " %")
    return text if float(f"{share:.4f}") == 0 else f"{'+' if share > 0 else '−'}{text}"


def byte_text(n: float) -> str:
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n:.0f} bytes"
