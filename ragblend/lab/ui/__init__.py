"""`ragblend ui`: a page on this machine to drop documents on, ask, and see what blending did."""
