"""The runtime of slim checkpoints: it imports torch and transformers alone, and travels with the checkpoint.

`format` says what a slim checkpoint holds; `layers`, `heads` and `cache` compute with it; `load` makes the model class.
What produces such a checkpoint lies elsewhere.
"""
