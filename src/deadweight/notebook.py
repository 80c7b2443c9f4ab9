"""Results that notebooks render. Results stand below reports, so the report is looked up when one is shown."""

from __future__ import annotations

from importlib import import_module


class Shown:
    """A result of which `deadweight.report.html` knows a picture."""

    def _repr_html_(self) -> str:
        """What Jupyter and its relatives show in place of `repr`."""
        html: str = import_module("deadweight.report.html.notebook").render_fragment(self)
        return html
