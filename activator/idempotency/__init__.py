"""Idempotency keys: a call runs once, and its repeats get the same response. Contains the
middleware in front of the gateway, and its stores."""
