"""Writing what was made: complete or not at all, in a layout that people can load."""
