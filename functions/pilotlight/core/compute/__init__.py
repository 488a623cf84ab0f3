"""Processes that compute with what strangers sent, with bounded time and memory, apart from the
event loops that others depend on."""
