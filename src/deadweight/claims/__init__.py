"""Claims: what a proof says of parameters, and the motions of parameters that it calls redundant."""
