"""How good and how fast a language model is on a text, and beside another one."""
