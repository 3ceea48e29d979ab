"""The gain of blending for a team's traffic, computed from its request logs: `ragblend analyze`. Read `analysis`
first."""
