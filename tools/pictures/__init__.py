"""Generators of the documentation's pictures."""
