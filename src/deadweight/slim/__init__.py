"""The runtime of slim checkpoints: it imports only torch and transformers, and travels with the checkpoint.

`format` says what a slim checkpoint holds; `layers`, `heads` and `cache` compute with it; `load` makes the model class.
`reduce` and `compress` produce such checkpoints.
"""
