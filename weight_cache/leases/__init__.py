"""Leases on models, the processes that hold them, and predicted load times. Files on the disk are
in `weight_cache.store`, the read-ahead into memory in `weight_cache.dram`."""
