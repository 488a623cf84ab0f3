"""Object stores: bytes by key, in a directory or in S3, for bundles, manifests, files of weights
and copies of snapshots.

This module selects the store that a setting names. Stores verify nothing: readers must compare the
bytes with the hash that names them."""

from __future__ import annotations

from pathlib import Path

from pilotlight.core.object_store.directory import DirectoryStore
from pilotlight.core.object_store.interface import ObjectInfo, ObjectStore
from pilotlight.core.object_store.keys import blob_key, check_key, is_key
from pilotlight.core.settings import Paths, PlatformSettings, SettingsInvalid

__all__ = [
    "DirectoryStore",
    "ObjectInfo",
    "ObjectStore",
    "blob_key",
    "blob_store",
    "check_key",
    "is_key",
    "open_store",
]

ATTEMPTS = 5
TIMEOUT_S = 30.0


def open_store(
    where: str,
    *,
    setting: str,
    client: str = "auto",
    attempts: int = ATTEMPTS,
    timeout_s: float = TIMEOUT_S,
) -> ObjectStore:
    """Open the store at `where`, the value of `setting` (named in errors): a directory, or
    `s3://bucket/prefix`.

    `attempts`: of each S3 request; `timeout_s`: an attempt fails after this long without data.
    Credentials, region and endpoint are resolved on the first call. Raises ValueError."""
    if where.startswith("s3://"):
        bucket, _, prefix = where.removeprefix("s3://").partition("/")
        if not bucket or (prefix.strip("/") and not is_key(prefix.strip("/"))):
            raise ValueError(
                f"{setting} = {where!r}: s3://bucket/prefix needs a bucket, and a valid prefix"
            )
        try:
            from pilotlight.core.object_store.s3 import S3Store
        except ImportError as e:
            raise ValueError(
                f"{setting} = {where!r}: {e.name} is not installed: pip install 'pilotlight[node]'"
            ) from e
        try:
            return S3Store(
                bucket=bucket,
                prefix=prefix.strip("/"),
                client=client,
                attempts=attempts,
                timeout_s=timeout_s,
            )
        except ValueError as e:
            raise ValueError(f"{setting} = {where!r}: {e}") from e
    if "://" in where or not where:
        raise ValueError(f"{setting} = {where!r}: must be a directory, s3://bucket/prefix, or null")
    return DirectoryStore(Path(where))


def blob_store(
    settings: PlatformSettings,
    paths: Paths,
    *,
    attempts: int = ATTEMPTS,
    timeout_s: float = TIMEOUT_S,
) -> ObjectStore:
    """Open the store of the platform's blobs: `platform.blobs`, or `<home>/blobs`. Raises
    SettingsInvalid."""
    where = settings.blobs or str(paths.home / "blobs")
    try:
        return open_store(
            where,
            setting="platform.blobs",
            client=settings.s3_client,
            attempts=attempts,
            timeout_s=timeout_s,
        )
    except ValueError as e:
        raise SettingsInvalid(str(e)) from e
