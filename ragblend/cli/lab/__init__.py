"""Commands of `ragblend.lab`."""
