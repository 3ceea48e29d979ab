"""The trainer of the embedded model: from stories to the weights that `ragblend.demo` ships. Not part of the wheel."""
