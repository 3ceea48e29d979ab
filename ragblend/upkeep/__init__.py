"""What an operator runs: verify, gc, calibrate, profile, explain, serve, keys."""
