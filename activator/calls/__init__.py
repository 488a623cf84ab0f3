"""Calls: their state, execution, retries and fallbacks, and the checks of their arguments.

This package does not handle HTTP; `gateway` answers callers.
"""
