"""Aggregates for the dashboard and the API, read from the database: sums from the rollups,
percentiles from histograms, the newest calls by index.

These modules return plain records and know nothing of pages. Only `recent_calls` and `model_stats`
read single usage records, both with a limit, and `feedback` those of the calls that it is about."""
