"""Results that notebooks render and `print` shows. They stand below reports, so the report is looked up when shown."""

from __future__ import annotations

from importlib import import_module


class Shown:
    """A result of which `deadweight.report` knows a text and a picture."""

    def __str__(self) -> str:
        """What its command prints: `print(result)` shows the report, not the data."""
        text: str = import_module("deadweight.report.printed").printed(self)
        return text

    def _repr_html_(self) -> str:
        """What Jupyter and its relatives show in place of `repr`."""
        html: str = import_module("deadweight.report.html.notebook").render_fragment(self)
        return html
