"""From proofs to a smaller model: plan, apply, verify."""
