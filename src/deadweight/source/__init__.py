"""Opening a model: from a hub id, a folder, a config alone, a .gguf file, a callable, or a module.

Nothing is imported here, so that reading a text does not import transformers.
"""
