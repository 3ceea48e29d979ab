"""Frozen studies: each settled a question of the design, with its JSON in `data/results`. Not part of the wheel."""
