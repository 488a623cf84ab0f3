"""Bytes of models, on their way from origin to memory: origin → NVMe → DRAM → HBM.

The bottom layer: it imports nothing of ours and knows no tenants, only manifests and
who may lease them. Other packages enter through its doors: `types`, `errors`,
`protocol`, `manifest` and `client`.
"""
