"""Loss, speed and cache of a language model on a text, alone or next to another model."""
