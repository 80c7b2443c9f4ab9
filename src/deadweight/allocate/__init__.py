"""How many heads, of what size, in which layer: the error bound, its exact minimum, and a plan ready to train."""
