"""Calls: their state, execution, retries and fallbacks, and how their responses are read.

This package does not handle HTTP; `gateway` answers callers.
"""
