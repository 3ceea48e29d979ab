"""The shared tier: Redis or Valkey, S3 and other object stores."""
