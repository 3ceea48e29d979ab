"""Engine on transformers: models, their layers run one at a time, generation."""
