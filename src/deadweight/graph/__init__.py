"""The traced model: one list of operations over named parameters."""
