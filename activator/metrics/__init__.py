"""Prometheus metrics of an activator.

Statistics of calls are sent to the controller by `call_stats`."""
