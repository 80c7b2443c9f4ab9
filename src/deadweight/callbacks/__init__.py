"""Audits at the start of training, as callbacks of the trainers that people use."""
