"""A model repository of the Hugging Face hub, pinned to one commit.

`huggingface_hub` resolves the commit and lists its files, with the token and endpoint from its
standard locations; files are read over HTTP range requests from the URLs that it returns."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from weight_cache.errors import SourceInvalid
from weight_cache.sources.http_client import RangeClient, RemoteFile, bearer_header
from weight_cache.sources.retries import TransientSourceError
from weight_cache.sources.source import SourceFile, sort_source_files

_ADDRESS = re.compile(r"hf://([\w.-]+/[\w.-]+)(?:@([\w./-]+))?/?\Z")
_READS_AT_ONCE = 8
_NOT_WEIGHTS = frozenset({".gitattributes"})


class HubSource:
    """The files of one commit. `files` resolves the commit; there are no requests before."""

    def __init__(
        self,
        repository: str,
        *,
        revision: str | None,
        token: str | None,
        endpoint: str | None,
        web: RangeClient | None = None,
    ) -> None:
        self._repository = repository
        self._revision = revision
        self._token = token
        self._endpoint = endpoint
        self._commit = ""
        self._web = web

    @classmethod
    def at(cls, address: str, *, token: str | None, environ: Mapping[str, str]) -> HubSource:
        """Create the source for `hf://org/name@revision`: a branch, a tag or a commit; default: the
        repository's main branch."""
        match = _ADDRESS.match(address)
        if match is None:
            raise SourceInvalid(
                f"{address}: invalid repository: write hf://org/name or hf://org/name@revision"
            )
        return cls(
            match[1],
            revision=match[2],
            token=token or environ.get("HF_TOKEN"),
            endpoint=environ.get("HF_ENDPOINT"),
        )

    def __repr__(self) -> str:
        return f"<HubSource {self.name}>"

    @property
    def name(self) -> str:
        """`hf://org/name@commit`, once the commit is known."""
        revision = self._commit or self._revision
        return f"hf://{self._repository}{f'@{revision}' if revision else ''}"

    @property
    def reads_at_once(self) -> int:
        """A single stream is often slower than the network."""
        return _READS_AT_ONCE

    def files(self) -> list[SourceFile]:
        """Resolve the commit and list its files. Raises SourceInvalid."""
        hub, token = self._hub()
        headers = bearer_header(token)
        api = hub.HfApi(endpoint=self._endpoint, token=token and token.strip())
        web = self._web = self._web or RangeClient(headers=headers)
        self._commit = str(
            web.patiently(
                lambda: self._request(
                    hub, lambda: api.model_info(self._repository, revision=self._revision).sha
                )
            )
        )

        def tree() -> list[Any]:
            return list(api.list_repo_tree(self._repository, recursive=True, revision=self._commit))

        found = [
            entry
            for entry in web.patiently(lambda: self._request(hub, tree))
            if isinstance(entry, hub.hf_api.RepoFile)
        ]
        return sort_source_files(
            (_source_file(entry) for entry in found if entry.path not in _NOT_WEIGHTS),
            where=self.name,
        )

    def read(self, file: SourceFile, offset_bytes: int, length_bytes: int) -> bytes:
        """Read a range. A commit's files never change, so only their length is checked."""
        import huggingface_hub

        if self._web is None:
            raise SourceInvalid(f"{self.name} must be listed before it is read")
        url = huggingface_hub.hf_hub_url(
            self._repository, file.path, revision=self._commit, endpoint=self._endpoint
        )
        return self._web.read(
            RemoteFile(url=url, size_bytes=file.size_bytes),
            offset_bytes=offset_bytes,
            length_bytes=length_bytes,
        )

    def close(self) -> None:
        """Close the HTTP client."""
        if self._web is not None:
            self._web.close()

    def _hub(self) -> tuple[Any, str | None]:
        """The library, and the token to use."""
        try:
            import huggingface_hub
        except ImportError as e:
            raise SourceInvalid(
                f"{self.name}: reading from the hub needs huggingface_hub: pip install "
                f"'pilotlight[weights]'"
            ) from e
        return huggingface_hub, self._token or huggingface_hub.get_token()

    def _request(self, hub: Any, call: Callable[[], Any]) -> Any:
        errors = hub.errors
        # of the HTTP library that this version of huggingface_hub uses: httpx, or its successor
        http_error = next(k for k in errors.HfHubHTTPError.__bases__ if k is not OSError)
        try:
            return call()
        except errors.GatedRepoError as e:
            raise SourceInvalid(
                f"{self.name} is gated: accept its terms on its page, then set a token of that "
                f"account with secret="
            ) from e
        except errors.RepositoryNotFoundError as e:
            raise SourceInvalid(
                f"{self.name}: no such repository, or it is private: set a token with secret= or "
                f"HF_TOKEN"
            ) from e
        except errors.RevisionNotFoundError as e:
            raise SourceInvalid(
                f"{self.name}: the repository has no such branch, tag or commit"
            ) from e
        except errors.HfHubHTTPError as e:
            status = e.response.status_code
            kind = TransientSourceError if status >= 500 or status == 429 else SourceInvalid
            raise kind(f"{self.name}: the hub answers {status}: {str(e).splitlines()[0]}") from e
        except (http_error, OSError) as e:
            raise TransientSourceError(
                f"{self.name}: the hub does not answer: {str(e) or type(e).__name__}"
            ) from e
        except ValueError as e:
            raise SourceInvalid(f"{self.name}: {e}") from e


def _source_file(entry: Any) -> SourceFile:
    return SourceFile(
        path=entry.path,
        size_bytes=entry.size,
        version=entry.lfs.sha256 if entry.lfs else entry.blob_id,
    )
