"""What blending would do for a team's traffic, from its logs: `ragblend analyze`. Read `analysis` first."""
