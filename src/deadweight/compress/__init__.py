"""Smaller attention heads and caches: which dimensions matter is measured on text, the rest is cut, the loss is judged."""
