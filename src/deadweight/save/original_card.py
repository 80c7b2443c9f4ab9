"""The card of the original model: its front matter and its text, which the card of a smaller model keeps."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from deadweight.source.type_aliases import JsonObject

LARGEST = 1_000_000  # characters of a card
MEASURED = ("model-index",)  # results of the original: they do not hold for another function
_FRONT = re.compile(r"\A\s*---[ \t]*\r?\n(.*?)^---[ \t]*(?:\r?\n|\Z)", re.S | re.M)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_CACHED = re.compile(r"models--(?P<owner>.+?)(?:--(?P<name>.+))?")


@dataclass(frozen=True)
class OriginalCard:
    """The README.md of the original; empty if it has none."""

    metadata: JsonObject = field(default_factory=dict)
    body: str = ""
    hub_id: str | None = None  # where the Hub has the original, if that is known


def read_original(folder: Path | None) -> OriginalCard:
    """The card in the folder of the original."""
    file = None if folder is None else folder / "README.md"
    if folder is None or file is None or not file.is_file():
        return OriginalCard(hub_id=cached_id(folder))
    text = file.read_text(encoding="utf-8", errors="replace")[:LARGEST]
    return OriginalCard(*split_front(text), hub_id=cached_id(folder))


def split_front(text: str) -> tuple[JsonObject, str]:
    """Front matter and the rest. Front matter that is no YAML table stays part of the text."""
    match = _FRONT.match(text)
    if match is None:
        return {}, text
    try:
        metadata = yaml.safe_load(match[1])
    except yaml.YAMLError:
        return {}, text
    return (metadata, text[match.end() :]) if isinstance(metadata, dict) else ({}, text)


def add_metadata(original: OriginalCard, source: str, tags: tuple[str, ...], *, exact: bool) -> str:
    """Front matter as YAML: that of the original, with its licence, and what is new."""
    metadata = {key: value for key, value in original.metadata.items() if exact or key not in MEASURED}
    base = original.hub_id or hub_id(source)
    if base is not None:
        metadata["base_model"] = base
    before = metadata.get("tags") or []
    metadata["tags"] = list(dict.fromkeys([*([before] if isinstance(before, str) else before), *tags]))
    return f"---\n{yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)}---\n"


def hub_id(source: str) -> str | None:
    """The name of the original on the Hub, if it was opened by that name."""
    return source if _HUB_ID.fullmatch(source) and not Path(source).expanduser().exists() else None


def cached_id(folder: Path | None) -> str | None:
    """The name on the Hub of a folder in the cache of huggingface_hub: …/models--owner--name/snapshots/…"""
    for part in () if folder is None else folder.parts:
        if match := _CACHED.fullmatch(part):
            return f"{match['owner']}/{match['name']}" if match["name"] else match["owner"]
    return None


def shown_source(source: str) -> str:
    """The original as a reader elsewhere may know it: its name on the Hub, or the last part of its path."""
    return source if hub_id(source) is not None else Path(source).name or source
