"""Rewrites: what a claim does to the weights of a model, in float64."""
