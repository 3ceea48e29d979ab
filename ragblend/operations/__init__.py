"""Functions of `ragblend verify`, `gc`, `push`, `sign`, `doctor` and `serve`."""
