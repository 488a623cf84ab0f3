"""What Prometheus reads of an activator.

What calls looked like goes to the controller by `call_stats`.
"""
