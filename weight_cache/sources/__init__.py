"""Sources of models: a directory, S3, the web, a model hub. One module per kind; `open_source`
selects one.

Not imported on nodes: sources are read when an app is deployed or weights are pushed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from weight_cache.errors import SourceInvalid
from weight_cache.sources.directory import DirectorySource
from weight_cache.sources.filtered import FilteredSource
from weight_cache.sources.source import Source, SourceFile

__all__ = ["Source", "SourceFile", "is_remote", "open_source"]

_WEB = ("http://", "https://")
_KINDS = (
    "a directory, s3://bucket/prefix, http(s)://… (one file per address) or hf://org/name@revision"
)


def is_remote(where: str | Path) -> bool:
    """Whether `where` is a URL and not a directory."""
    return "://" in str(where)


def open_source(
    where: str | Path | Sequence[str],
    *,
    include: Sequence[str] = (),
    token: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Source:
    """Open the source that a user named; nothing is read before `files()`. Raises SourceInvalid.

    `where`: a directory, `s3://bucket/prefix`, one or several `http(s)://` addresses, or
    `hf://org/name@revision`. `include`: patterns of files to include (`FilteredSource`); empty =
    all. `token`: for the hub, or sent to web servers as `Authorization: Bearer`. `environ`: checked
    for credentials (`AWS_…`, `HF_TOKEN`) before the standard locations; default: the process's
    environment."""
    source = _open(where, token, os.environ if environ is None else environ)
    return FilteredSource(source, include) if include else source


def _open(
    where: str | Path | Sequence[str], token: str | None, environ: Mapping[str, str]
) -> Source:
    if not isinstance(where, str | Path):
        return _web(list(where), token)
    text = str(where)
    if text.startswith(_WEB):
        return _web([text], token)
    if text.startswith("s3://"):
        from weight_cache.sources.s3 import S3Source

        return S3Source.at(text, environ=environ)
    if text.startswith("hf://"):
        from weight_cache.sources.hub import HubSource

        return HubSource.at(text, token=token, environ=environ)
    if is_remote(text):
        raise SourceInvalid(f"{text}: unsupported source of weights: expected {_KINDS}")
    return DirectorySource(Path(where).expanduser())


def _web(urls: list[str], token: str | None) -> Source:
    from weight_cache.sources.web import WebSource

    if not urls or not all(url.startswith(_WEB) for url in urls):
        raise SourceInvalid(f"{urls}: a list must contain http(s):// addresses, one per file")
    return WebSource(urls, token=token)
