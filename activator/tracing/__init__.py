"""Traces: built after a call has ended, from timestamps that it has anyway, and only for kept
traces."""
