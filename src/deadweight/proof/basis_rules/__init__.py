"""How a change of basis passes each operation. The first line of a rule is its theorem."""

from deadweight.proof.basis_rules import arithmetic, concatenation, maps, places, reductions, shapes

__all__ = ["arithmetic", "concatenation", "maps", "places", "reductions", "shapes"]
