"""The laws: one file each."""
