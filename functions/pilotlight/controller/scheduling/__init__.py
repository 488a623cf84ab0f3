"""Submitted calls that the control plane stores: schedules, cron, the dispatch queue that
activators claim from, states and results."""
