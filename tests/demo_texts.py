"""Chunks about the made-up world that the embedded model knows, and a question that the first of them answers."""

A = "George Keller lives in Kinport. Julia Bishop works for Synon."
B = "The company has its main office in Wesstad. The firm sells knives."
C = "Arthur Archer lives in Calville. He sells knives for the firm."
QUESTION = "Where does George Keller live?"
