"""Smaller attention heads and caches: what matters is measured on text, the rest is cut, and the loss is judged."""
