"""How close an answer is to full prefill: `ragblend bench quality`."""
