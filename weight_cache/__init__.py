"""Bytes of models, on their way from origin to memory: origin → NVMe → DRAM → HBM.

    sources, manifest     what a user names, and its files and chunks by hash (user's machine)
    objects, origin       where blobs lie: a directory or S3, read in ranges of one version
    store                 the node's disk: each model once, verified while it comes in, evicted by worth
    leases, lanes         who holds a model until when; whose bytes come first
    readahead, bandwidth  the page cache, and how long bytes will take
    tensors               in the worker: tensors mapped, pooled, or delivered to a device

The bottom layer: it imports nothing of ours and knows no tenants, only manifests and who may lease
them. Other packages enter through its doors: `types`, `errors`, `protocol`, `manifest`, `client`,
`objects`, `sources`, `tensors`, `settings`."""
