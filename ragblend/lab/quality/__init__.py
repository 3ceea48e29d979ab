"""How close an answer is to full prefill's, and how good it is: `ragblend bench quality`. Read `study` first."""
