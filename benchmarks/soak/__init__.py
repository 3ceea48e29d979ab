"""Soak test of a served deployment: two replicas under load and faults. Checks answers, hits, counters and memory."""
