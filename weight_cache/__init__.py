"""The weight cache: moves model bytes from the origin to memory (origin → NVMe → DRAM → HBM).

    sources, manifest     what a user names; its files and chunks by hash (on the user's machine)
    fetch                 range reads of one version from the origin or a peer, by priority
    store                 the node's disk: each model once, verified on arrival, evicted by worth
    leases                leases on models; the page cache, and predicted load times
    peers                 chunks from other nodes
    tensors               in the worker: tensors mapped, pooled, or copied to a device

It imports only `pilotlight.core`. It has no concept of tenants, only of manifests and leases."""
