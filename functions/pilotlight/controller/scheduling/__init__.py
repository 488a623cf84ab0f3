"""Submitted calls that the control plane keeps: schedules, cron, the dispatch queue that activators
take from, states and results."""
