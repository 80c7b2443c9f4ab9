"""How a shift passes each operation. The first line of a rule is its theorem; an operation without a rule blocks."""

from deadweight.proof.shift_rules import arithmetic, elements, recurrent, reductions

__all__ = ["arithmetic", "elements", "recurrent", "reductions"]
