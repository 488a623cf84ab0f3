"""Pages of the section Calls: calls, the form that makes one, logs and traces."""
