"""Files that are written in one step, read only if they are regular files, and checked for damage."""
