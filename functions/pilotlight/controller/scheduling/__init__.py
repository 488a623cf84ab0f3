"""Submitted calls that the control plane stores: schedules, the dispatch queue that
activators claim from, states and results."""
