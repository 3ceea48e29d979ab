"""Closeness of answers to full prefill's, and their quality: `ragblend bench quality`. Read `study` first."""
