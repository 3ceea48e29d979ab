"""Files that appear in one step, are read only when regular, and tell when they are damaged."""
