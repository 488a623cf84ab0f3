"""Requests for the controller that arrive at an activator, and its own questions to it."""
