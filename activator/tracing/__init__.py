"""Traces: made after a call has ended, from the clocks that it carries anyway, and only of calls
whose trace is kept."""
