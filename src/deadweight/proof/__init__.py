"""Proofs about a traced graph: how a change of parameters travels through it, and where it stops."""
