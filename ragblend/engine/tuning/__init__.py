"""Measurements that set the rule and ratio of requests: calibrations, machine profiles, the loading controller."""
