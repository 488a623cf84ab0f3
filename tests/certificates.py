"""Plugin: tests, and the processes that they start, trust one authority, which signs nothing
(`no_authority.pem`; its key was not kept).

Reading the hundred and more that a machine trusts takes some 30 ms of CPU time for each HTTP client
and each Kubernetes client, and there are thousands. No test asks a server whose certificate they
have signed: servers of tests are on loopback, with authorities of their own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_configure() -> None:
    """See ssl.SSLContext.load_default_certs, and the environment variables of HTTPX."""
    os.environ["SSL_CERT_FILE"] = str(Path(__file__).with_name("no_authority.pem"))
