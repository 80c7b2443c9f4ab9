"""Model cards: the Hub can read them, they keep the card of the original, name no path, and their numbers agree."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

import deadweight
from deadweight import embedded
from deadweight.save.model_card import (
    CodedCacheCard,
    CurveRow,
    ErrorRow,
    LawRow,
    ReducedCard,
    SmallerHeadsCard,
    card_text,
)
from deadweight.save.original_card import OriginalCard, cached_id, hub_id, read_original, shown_source, split_front

BODY = "# My model\n\nIt speaks like a *pirate*.\n\n## Usage\n\n```python\nprint('arr')\n```\n"
FRONT = """---
license: openrail
license_name: pirate-licence
language: [en, fr]
tags: text-generation-inference
pipeline_tag: text-generation
model-index:
- name: My model
  results:
  - task: {type: text-generation}
    dataset: {type: treasure, name: Treasure}
    metrics: [{type: perplexity, value: 3.5}]
---
"""


@pytest.fixture
def original(tmp_path: Path) -> Path:
    folder = tmp_path / "pirate"
    shutil.copytree(embedded.path(), folder)
    (folder / "README.md").write_text(FRONT + BODY, encoding="utf-8")
    return folder


def table(text: str, heading: str) -> list[list[str]]:
    """The rows of the first table under a heading, without its head."""
    rows = re.findall(r"^\| (.*) \|$", text.partition(f"## {heading}\n")[2].partition("\n#")[0], re.M)
    return [row.split(" | ") for row in rows[2:]]


def whole(number: str) -> int:
    return int(number.replace(",", ""))


@pytest.mark.parametrize("layout", ["slim", "stock"])
def test_a_reduced_model_keeps_the_card_of_its_original_and_adds_to_it(original: Path, layout: str) -> None:
    out = original.parent / "out"
    result = deadweight.reduce(original, out, layout=layout)
    text = (out / "README.md").read_text(encoding="utf-8")
    card = ModelCard(text)
    assert card.data.license == "openrail"
    assert card.data.language == ["en", "fr"]
    assert card.data.pipeline_tag == "text-generation"
    assert card.data.tags[:3] == ["text-generation-inference", "deadweight", "exact-reduction"]
    assert ("custom_code" in card.data.tags) == (layout == "slim")
    assert card.data.eval_results is not None, "the same function has the same results"
    assert BODY.strip() in card.text
    assert card.text.index("pirate, reduced exactly") < card.text.index("# Card of the original")
    assert str(original.parent) not in text + (out / "deadweight.json").read_text(encoding="utf-8")
    rows = table(text, "What was taken out")
    total = sum(whole(row[-1]) for row in rows[:-1])
    assert whole(rows[-1][-1]) == total == result.saves
    assert all("DW" in row[0] and row[1].endswith(".") for row in rows[:-1])
    said = re.search(r"([\d,]+) of 1,878,144 parameters", text)
    assert said is not None and whole(said[1]) == total
    assert table(text, "How it was checked")[0][0] == "logits"


def test_a_coded_cache_shows_its_size_among_others_and_drops_results_of_the_original(original: Path) -> None:
    out = original.parent / "out"
    deadweight.compress(original, out, keep_kv=0.25)
    text = (out / "README.md").read_text(encoding="utf-8")
    card = ModelCard(text)
    assert card.data.license == "openrail" and "kv-cache-compression" in card.data.tags
    assert card.data.eval_results is None, "another function has other results"
    assert BODY.strip() in card.text and str(original.parent) not in text
    rows = table(text, "Size against loss")
    tried = [float(row[0][:-1]) for row in rows if row[-1] != "not tried"]
    assert len(tried) == 1 and 23.0 < tried[0] <= 25.0  # the share that was asked for, in whole units
    shares, losses = zip(*((float(row[0][:-1]), float(row[2])) for row in rows), strict=True)
    assert list(shares) == sorted(shares) and list(losses) == sorted(losses, reverse=True)


def test_a_model_without_a_card_gets_one_that_the_hub_reads(tmp_path: Path) -> None:
    deadweight.reduce("demo", tmp_path / "out", select=["DW002"])
    text = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert ModelCard(text).data.to_dict() == {"tags": ["deadweight", "exact-reduction", "custom_code"]}
    assert "Card of the original" not in text


def reduced(saved: int, after: int) -> str:
    card = ReducedCard("org/name", "slim", (100, after), (LawRow("DW001 unused", 2, saved),), None)
    return card_text(card, OriginalCard(), "load()")


def test_a_sum_that_differs_from_what_the_file_lost_is_explained() -> None:
    assert "10 of 100 parameters gone" in reduced(10, 90)
    assert "account for" not in reduced(10, 90)
    assert "The file holds 8 numbers less than the original; the laws account for 10." in reduced(10, 92)


def test_a_model_of_the_hub_is_the_base_model() -> None:
    assert ModelCard(reduced(1, 99)).data.base_model == "org/name"
    cached = OriginalCard({"base_model": "other/ancestor"}, hub_id="gpt2")
    text = card_text(CodedCacheCard("/home/me/gpt2", (2, 1), 8, 0.5, ("x",)), cached, "load()")
    assert ModelCard(text).data.base_model == "gpt2"
    unknown = card_text(CodedCacheCard("/home/me/mine", (2, 1), 8, 0.5, ("x",)), OriginalCard(), "load()")
    assert ModelCard(unknown).data.base_model is None and "/home" not in unknown


def test_one_size_alone_is_no_curve() -> None:
    card = CodedCacheCard("m", (2, 1), 8, 0.5, ("x",), (CurveRow(0.5, 1e-3, "y"),))
    assert "Size against loss" not in card_text(card, OriginalCard(), "load()")


@pytest.mark.parametrize(
    ("text", "metadata", "body"),
    [
        ("---\nlicense: mit\n---\nhello", {"license": "mit"}, "hello"),
        ("---\r\nlicense: mit\r\n---\r\nhello", {"license": "mit"}, "hello"),
        ("hello\n---\nlicense: mit\n---\n", {}, "hello\n---\nlicense: mit\n---\n"),
        ("---\nlicense: [mit\n---\nhello", {}, "---\nlicense: [mit\n---\nhello"),
        ("---\n- a list\n---\nhello", {}, "---\n- a list\n---\nhello"),
        ("---\n!!python/object/apply:os.getcwd []\n---\nhi", {}, "---\n!!python/object/apply:os.getcwd []\n---\nhi"),
        ("", {}, ""),
    ],
)
def test_front_matter_is_read_and_what_is_none_stays_text(text: str, metadata: dict, body: str) -> None:
    assert split_front(text) == (metadata, body)


def test_a_card_that_is_no_utf8_is_kept_as_far_as_it_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_bytes(b"caf\xe9")
    assert read_original(tmp_path).body == "caf\ufffd"
    assert read_original(tmp_path / "none") == OriginalCard() == read_original(None)


def test_the_name_on_the_hub_is_known_by_the_folder_of_the_cache() -> None:
    root = Path("/home/me/.cache/huggingface/hub")
    assert cached_id(root / "models--org--a-b--c" / "snapshots" / "abc") == "org/a-b--c"
    assert cached_id(root / "models--gpt2" / "snapshots" / "abc") == "gpt2"
    assert cached_id(Path("/home/me/model")) is None and cached_id(None) is None


def test_a_path_is_shown_by_its_last_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert [shown_source(s) for s in ("org/name", "a/b", str(tmp_path / "a"), "demo", "../x/y")] == [
        "org/name",
        "b",
        "a",
        "demo",
        "y",
    ]
    assert hub_id("a/b") is None and hub_id("org/name") == "org/name"


LOADING = 'model = deadweight.load("out")'
CARDS = {
    "reduced": ReducedCard("org/model", "slim", (1000, 900), (LawRow("DW002 key-bias", 4, 100, "Why."),), None),
    "heads": SmallerHeadsCard("org/model", (64, 32), (1000, 900), "perplexity 2.00 → 2.10"),
    "cache": CodedCacheCard("org/model", (512, 128), 1024, 0.27, ("one text: +1 %", "another text: +2 %")),
}


def shown(name: str) -> str:
    return card_text(CARDS[name], OriginalCard(), LOADING)


@pytest.mark.parametrize("name", CARDS)
def test_a_card_has_a_header_a_title_and_the_code_that_loads_the_model(name: str) -> None:
    text = shown(name)
    assert text.startswith("---\n") and "\n---\n# model, " in text
    assert f"```python\n{LOADING}\n```" in text and text.endswith("\n")


def test_a_reduced_card_counts_what_is_gone_law_by_law() -> None:
    text = shown("reduced")
    assert "100 of 1,000 parameters gone (10.00%)" in text
    assert "| DW002 key-bias | Why. | 4 | 100 |\n| all | | 4 | 100 |" in text


def test_errors_are_listed_only_if_they_were_measured() -> None:
    assert "How it was checked" not in shown("reduced")
    checked = ReducedCard("m", "slim", (10, 9), (), "6 random inputs", (ErrorRow("logits", 1e-15, None, 3e-6),))
    assert "| logits | 1.0e-15 | not measured | 3.0e-06 |" in card_text(checked, OriginalCard(), LOADING)


def test_a_compressed_card_says_that_the_function_is_another_one_and_what_it_costs() -> None:
    assert all("not the same function" in shown(name) for name in ("heads", "cache"))
    assert "32 of 64" in shown("heads") and "perplexity 2.00 → 2.10." in shown("heads")
    assert "128 bytes of cache per token in place of 512" in shown("cache") and "27.0% of a 16-bit cache" in shown(
        "cache"
    )
    assert "- one text: +1 %\n- another text: +2 %" in shown("cache")
