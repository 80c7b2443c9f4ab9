"""The search for claims: which changes to try, which spaces there are, and what has been proved so far."""
