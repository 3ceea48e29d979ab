"""What was measured once and decides every request: calibrations, machine profiles, the loading pipeline."""
