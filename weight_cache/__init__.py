"""Bytes of models, on their way from origin to memory: origin → NVMe → DRAM → HBM.

    sources, manifest     what a user names, and its files and chunks by hash (user's machine)
    fetch                 ranges of one version from the origin or a peer, in order of urgency
    store                 the node's disk: each model once, verified while it arrives, evicted by worth
    leases                who holds a model until when; the page cache, and how long bytes will take
    peers                 chunks from other nodes
    tensors               in the worker: tensors mapped, pooled, or delivered to a device

It imports `pilotlight.core` only, and knows no tenants: only manifests and who may lease them."""
