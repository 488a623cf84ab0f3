"""Batch files, and batches: files of requests that run as submitted calls at priority `batch`.

What tenants send is parsed in a process of its own (`line_process`), line by line."""
