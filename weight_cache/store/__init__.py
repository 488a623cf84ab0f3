"""The models on the node's disk: catalog, directory layout, eviction, integrity, and downloads that
end in a published model. How bytes are fetched is `weight_cache.fetch`; who holds a model is
`weight_cache.leases`."""
