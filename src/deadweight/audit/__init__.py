"""Findings with evidence, unknowns, and the account of all redundant dimensions."""
