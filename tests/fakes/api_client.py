"""A synchronous HTTP client of an API server, whichever it is, by a kubeconfig."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import httpx

from pilotlight.kubernetes.credentials import find_credentials
from pilotlight.kubernetes.settings import ClusterSettings
from tests.fakes.plain_http import NO_TLS


def api_client(kubeconfig: Path, *, is_anonymous: bool = False) -> httpx.Client:
    """With the kubeconfig's credentials, or none."""
    how, token = asyncio.run(_credentials(kubeconfig))
    verify = NO_TLS
    if how.host.startswith("https:"):
        verify = ssl.create_default_context(cafile=how.ssl_ca_cert)
        if how.cert_file and not is_anonymous:
            verify.load_cert_chain(how.cert_file, how.key_file)
    headers = {"authorization": token} if token and not is_anonymous else {}
    return httpx.Client(base_url=how.host, verify=verify, headers=headers, timeout=60)


def token_in(kubeconfig: Path) -> str | None:
    """The bearer token of a kubeconfig; None where it has another credential."""
    _, token = asyncio.run(_credentials(kubeconfig))
    return token.removeprefix("Bearer ") if token else None


async def _credentials(kubeconfig: Path) -> tuple[Any, str | None]:
    found = await find_credentials(ClusterSettings(kubeconfig=str(kubeconfig)))
    return found.configuration, await found.configuration.get_api_key_with_prefix("BearerToken")
