"""A stand-in for the package `vllm` of an engine environment: its server is the fake engine of the
tests."""

__version__ = "0.32.0+fake"
