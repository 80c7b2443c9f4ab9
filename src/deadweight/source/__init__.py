"""Getting a model in: from a hub id, a folder, a config alone, a .gguf file, a factory, or a live module."""

from deadweight.source.finite import check_finite
from deadweight.source.inputs import Inputs
from deadweight.source.model import Source, open_model
from deadweight.source.narrow import narrow
from deadweight.source.randomise import randomise
from deadweight.source.text import printable

__all__ = ["Inputs", "Source", "check_finite", "narrow", "open_model", "printable", "randomise"]
