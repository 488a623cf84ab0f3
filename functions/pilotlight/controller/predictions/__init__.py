"""Prediction logs: the Parquet files that activators ship, their retention, and their reading.

Files are stored and sent as they are: nothing of tenants is parsed or queried in this process."""
