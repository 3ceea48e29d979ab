"""Entries without tiers: their keys, KV arrays, file format and signatures."""
