"""The version, where any room can read it."""

__version__ = "0.1.0"
