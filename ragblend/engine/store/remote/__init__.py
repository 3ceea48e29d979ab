"""The shared tier: Redis or Valkey, S3 and other object stores.

A REMOTE TIER IS ADDED HERE: a module `SCHEME_values.py` with `open_values(url, timeout_s)`, which returns a ByteStore,
makes `--remote SCHEME://...` work. No other file changes.
"""
