"""What docs/structure.md shows: the house drawn from its imports, and one request traced through it."""
