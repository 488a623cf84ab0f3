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


class StoreOwned(WeightCacheError):
    """Raised when another live process already owns the store's directory."""

    code = "store_owned"


class ProtocolError(WeightCacheError):
    """Raised when the peer on the Unix socket breaks the wire protocol, or goes away."""

    code = "protocol_error"
