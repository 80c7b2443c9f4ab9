"""A module whose import fails."""

raise RuntimeError("not today")
