"""What docs/structure.md shows: the layers drawn from the imports, and one request traced through them."""
