"""Leases on models and the processes that hold them, and the memory tier: read-ahead into the page
cache and the prediction of load times. Files on the disk live in `weight_cache.store`."""
