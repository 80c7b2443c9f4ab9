"""The record of a benchmark, its setting and one row for everything that was measured, and the page made of it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

Setting = dict[str, Any]


def read(file: Path) -> tuple[Setting, list[dict[str, Any]]]:
    """The setting and the rows."""
    known = json.loads(file.read_text(encoding="utf-8"))
    return known["setting"], known["rows"]


def write(file: Path | None, setting: Setting, rows: Iterable[Any], **more: Any) -> None:
    """Rows are dataclasses, or what is made of them."""
    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    found = {"setting": setting, "rows": [r if isinstance(r, dict) else asdict(r) for r in rows], **more}
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def tell(text: str, page: Path | None) -> None:
    """On the screen, and as a page where one is asked for."""
    Console().print(text, markup=False, highlight=False, soft_wrap=True)
    if page is not None:
        page.write_text(text, encoding="utf-8")
