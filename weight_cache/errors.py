"""What can go wrong with bytes. One shallow tree; every error names the thing it is about."""

from __future__ import annotations


class WeightCacheError(Exception):
    """Base of every error that leaves this package.

    `code` travels over the wire and picks the class again on the other side.
    """

    code = "weight_cache_error"


class ManifestInvalid(WeightCacheError):
    """Raised when a manifest is not canonical JSON of the known shape, or breaks a bound."""

    code = "manifest_invalid"


class OriginUnavailable(WeightCacheError):
    """Raised when the origin does not have, or cannot deliver, the bytes asked for."""

    code = "origin_unavailable"


class ChunkCorrupt(WeightCacheError):
    """Raised when bytes do not match the digest that names them. They are never served."""

    code = "chunk_corrupt"


class StoreFull(WeightCacheError):
    """Raised when the store's size budget cannot hold a file and nothing may be evicted."""

    code = "store_full"


class StoreFailed(WeightCacheError):
    """Raised when the disk below the store refuses: no permission, read-only, I/O error."""

    code = "store_failed"


class StoreOwned(WeightCacheError):
    """Raised when another live process already owns the store's directory."""

    code = "store_owned"


class WeightCacheUnavailable(WeightCacheError):
    """Raised when the peer on the Unix socket breaks the wire protocol, or goes away."""

    code = "protocol_error"


class SourceInvalid(WeightCacheError):
    """Raised when what `Weights(...)` names cannot be read: wrong address, no rights, changed while
    it was read."""

    code = "source_invalid"


class TensorsInvalid(WeightCacheError):
    """Raised when a safetensors file breaks its format, or is not what was asked for."""

    code = "tensors_invalid"


class PoolFull(WeightCacheError):
    """Raised when a memory pool cannot hold what it is asked to; the message has both numbers."""

    code = "pool_full"


class DeviceFailed(WeightCacheError):
    """Raised when a device refuses memory or bytes, or holds other bytes than were sent."""

    code = "device_failed"


class LeaseUnknown(WeightCacheError):
    """Raised when a lease is waited for that was never opened, or ended."""

    code = "lease_unknown"
