"""The models on the node's disk: catalog, directory layout, eviction, integrity checks, and
downloads that publish a model. Fetching bytes is in `weight_cache.fetch`, leases are in
`weight_cache.leases`."""
