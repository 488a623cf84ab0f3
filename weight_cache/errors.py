"""Errors of the weight cache: one shallow tree. Every message names the object concerned."""

from __future__ import annotations


class WeightCacheError(Exception):
    """Base of every error that leaves this package.

    `code` is sent over the wire and selects the class again on the other side.
    """

    code = "weight_cache_error"


class ManifestInvalid(WeightCacheError):
    """Raised when a manifest is not canonical JSON of the known shape, or breaks a bound."""

    code = "manifest_invalid"


class OriginUnavailable(WeightCacheError):
    """Raised when the origin does not have, or cannot deliver, the requested bytes."""

    code = "origin_unavailable"


class ChunkCorrupt(WeightCacheError):
    """Raised when bytes do not match the digest that names them. They are never served."""

    code = "chunk_corrupt"


class StoreFull(WeightCacheError):
    """Raised when the store's size budget cannot hold a file and nothing may be evicted."""

    code = "store_full"


class StoreFailed(WeightCacheError):
    """Raised when the store's disk fails: no permission, read-only, I/O error."""

    code = "store_failed"


class StoreOwned(WeightCacheError):
    """Raised when another live process already owns the store's directory."""

    code = "store_owned"


class WeightCacheUnavailable(WeightCacheError):
    """Raised when the peer on the Unix socket violates the wire protocol or disconnects."""

    code = "protocol_error"


class SourceInvalid(WeightCacheError):
    """Raised when the source named by `Weights(...)` cannot be read: wrong address, no permission,
    or changed during the read."""

    code = "source_invalid"


class TensorsInvalid(WeightCacheError):
    """Raised when a safetensors file violates its format, or is not the requested one."""

    code = "tensors_invalid"


class PoolFull(WeightCacheError):
    """Raised when a memory pool is too small for a request; the message has both sizes."""

    code = "pool_full"


class DeviceFailed(WeightCacheError):
    """Raised when a device refuses memory or bytes, or holds other bytes than were written."""

    code = "device_failed"


class LeaseUnknown(WeightCacheError):
    """Raised when waiting for a lease that was never opened or has ended."""

    code = "lease_unknown"
