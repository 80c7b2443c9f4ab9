"""Getting a model in: from a hub id, a folder, a config alone, a .gguf file, a factory, or a live module.

Nothing is imported here: who needs a word about a text does not wait for transformers.
"""
