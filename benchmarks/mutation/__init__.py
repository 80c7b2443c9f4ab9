"""Mutants of the prover's conditions: how they are made, run against the tests, and reported."""
