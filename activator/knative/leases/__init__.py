"""Leases of pods among activators: the protocol, in this process and in Redis."""
