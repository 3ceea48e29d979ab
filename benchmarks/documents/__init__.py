"""Real-world files: words that the readers lose or add, retrieval of facts, and the cost of an edit."""
