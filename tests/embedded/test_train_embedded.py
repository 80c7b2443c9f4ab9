"""What scripts/train_embedded.py takes for prose."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_embedded.py"
SENTENCE = "It is long enough to be a paragraph of an article, and it ends as every sentence does: with a full stop."


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("train_embedded", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("markup", "prose"),
    [
        ("", ""),
        ("'''Anarchy''' ", "Anarchy "),
        ("[[Town|A town]] and [[river]]s. ", "A town and rivers. "),
        ("[[Image:a.jpg|thumb|a [[cat]]]]", ""),
        ("Mutual aid.&lt;ref name=&quot;a&quot;&gt;[http://a.b page]&lt;/ref&gt; ", "Mutual aid. "),
        ("Fish &amp;amp; chips{{fact|{{date}}}}. ", "Fish & chips. "),
        ("A [http://a.b/c page] here. ", "A page here. "),
    ],
)
def test_markup_before_a_sentence_is_stripped(script, markup: str, prose: str) -> None:
    assert script.strip_article(markup + SENTENCE) == prose + SENTENCE


@pytest.mark.parametrize("start", ["* ", "# ", "| ", "== ", "{| ", ": "])
def test_a_list_a_table_and_a_heading_are_no_prose(script, start: str) -> None:
    assert script.strip_article(start + SENTENCE) == ""


def test_a_line_without_a_full_sentence_is_no_prose(script) -> None:
    assert script.strip_article("See also.\n" + SENTENCE[:-1]) == ""


def test_plain_text_is_read_as_it_is(script, tmp_path: Path) -> None:
    file = tmp_path / "plain.txt"
    file.write_text("* not a dump, so nothing is stripped")
    assert script.read_prose(file) == file.read_bytes()
