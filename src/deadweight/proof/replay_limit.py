"""How large a value may be for the checker to replay the step that made it."""

LARGEST_REPLAYED = 4096  # elements: of a larger value a step keeps no labels, and the checker does not replay it
