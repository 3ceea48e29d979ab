"""What `ragblend verify`, `gc`, `push`, `sign`, `doctor` and `serve` run."""
