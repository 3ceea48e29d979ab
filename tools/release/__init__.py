"""Checks before a release: build the distributions, check their contents, and install them."""
