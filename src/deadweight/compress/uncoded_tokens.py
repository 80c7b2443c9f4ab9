"""How many tokens of a coded cache are kept in the model's own precision."""

UNCODED_TOKENS = 4  # the first of a sequence: they get much attention, and their keys are unlike those of other tokens
