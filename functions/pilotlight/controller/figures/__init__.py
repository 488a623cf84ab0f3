"""What pages show, read from the database: sums from the rollups, percentiles from histograms, the
newest calls by index.

Modules here answer with plain records and know nothing of pages; only `newest` touches single
records, and only as many as it shows."""
