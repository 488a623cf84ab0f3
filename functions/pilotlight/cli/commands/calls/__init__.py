"""Commands for calls: call, list, schedule, trace, feedback and load test."""
