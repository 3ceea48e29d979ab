"""`ragblend ui`: a page on this machine to drop documents on, ask questions and compare the modes."""
