"""How sensitive every head is to its logits, by context length: the exact norm of the softmax Jacobian."""
