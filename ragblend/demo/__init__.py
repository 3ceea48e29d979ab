"""The embedded model: an invented world, stories from it, and a small Llama that answers questions about them."""

from pathlib import Path

WEIGHTS = Path(__file__).parent / "weights"
"""The model's folder, as transformers loads it; its README.md names the commit that has the trainer."""
