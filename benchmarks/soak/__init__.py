"""A served deployment under load and faults, for thousands of requests: answers, foreign hits, memory, counters."""
