"""Writes what a page shows above or below the line, raised and lowered text and equations, as one line of text."""
