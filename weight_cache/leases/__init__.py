"""Leases on models, the processes that hold them, and the memory tier: read-ahead into the page
cache and predicted load times. Files on the disk are in `weight_cache.store`."""
