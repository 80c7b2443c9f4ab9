"""Smaller attention heads and caches: measure on text what matters, drop the rest, and measure the loss."""
