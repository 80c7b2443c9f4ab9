"""Attention heads: how saturated they are, how few dimensions they need, and how to take the rest out."""
