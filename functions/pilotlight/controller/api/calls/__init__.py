"""Routes about calls: submitted ones, feedback, traces."""
