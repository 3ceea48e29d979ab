"""What an operator runs: verify, gc, doctor, calibrate, profile, explain, serve, keys."""
