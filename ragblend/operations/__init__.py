"""Implementation of the commands `verify`, `gc`, `push`, `sign`, `doctor` and `serve`."""
