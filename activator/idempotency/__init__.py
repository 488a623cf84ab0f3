"""Calls under an idempotency key: run once, answered as often as they are repeated. The layer in
front of the gateway, and its stores."""
