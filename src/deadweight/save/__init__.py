"""Writing and loading checkpoints: complete or not at all, in a layout that other tools can load."""
