"""Access to one repository of a container registry: its origin, an HTTP client, and the header that
a 401 asks for.

Plain HTTP is used for a registry on this machine only, and a login is sent to the registry, or to
the token server that it names over TLS, alone.

Sources: token authentication: distribution.github.io, "Token Authentication Specification" and
"Oauth2 Token Authentication"."""

from __future__ import annotations

import base64
import json
import re
import ssl
from collections.abc import Mapping
from typing import Any

import httpx

from pilotlight.core.oci.image_reference import Repository
from pilotlight.core.oci.registry_login import DOCKER_HUB, Login
from pilotlight.core.transport.cookies import no_cookies

_HUB_HOST = "registry-1.docker.io"
_PARAMETER = re.compile(r'([a-z_]+)="([^"]*)"')
_MAX_TOKEN_BYTES = 64 * 1024


class AccessRefused(Exception):
    """The registry, or its token server, gives no access.

    Attributes:
        status: HTTP status of the answer that says so; 0: the answer cannot be used."""

    def __init__(self, reason: str, *, status: int = 0) -> None:
        super().__init__(reason)
        self.status = status


class RepositoryAccess:
    """Access of one user to one repository. Blocking; owner: one thread.

    Attributes:
        origin: scheme and host of the registry.
        http: client for requests to it; follows no redirect.
        authorization: value of the `authorization` header, "" while the registry asked for none."""

    def __init__(
        self, repository: Repository, login: Login | None, *, actions: str, timeout: httpx.Timeout
    ) -> None:
        """`actions`: what tokens are requested for, such as `pull,push`."""
        self.repository = repository
        self.login = login
        self.authorization = ""
        self._actions = actions
        host = _HUB_HOST if repository.host == DOCKER_HUB else repository.host
        self.origin = httpx.URL(f"{'http' if repository.is_loopback else 'https'}://{host}")
        # reading the trusted certificates of the system takes time: only for https
        verify = (
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            if repository.is_loopback
            else ssl.create_default_context()
        )
        self.http = httpx.Client(
            timeout=timeout,
            verify=verify,
            headers={"user-agent": "pilotlight", "accept-encoding": "identity"},
            cookies=no_cookies(),
        )

    def __repr__(self) -> str:
        return f"<RepositoryAccess {self.origin} {self.repository.name}>"

    def is_own(self, url: httpx.URL) -> bool:
        """Whether a URL leads to the registry itself: only there the header is sent."""
        return url.netloc == self.origin.netloc

    def authorize(self, response: httpx.Response) -> None:
        """Make the header that a response of status 401 asks for. Raises AccessRefused,
        httpx.HTTPError."""
        challenge = response.headers.get("www-authenticate", "")
        scheme, _, rest = challenge.partition(" ")
        if scheme.lower() == "basic":
            if self.login is None or not self.login.user:
                raise AccessRefused("it requires a login", status=401)
            pair = f"{self.login.user}:{self.login.password}".encode()
            self.authorization = f"Basic {base64.b64encode(pair).decode()}"
        elif scheme.lower() == "bearer":
            self.authorization = f"Bearer {self._token(dict(_PARAMETER.findall(rest)))}"
        else:
            raise AccessRefused(f"it requires an unknown authentication: {challenge[:80]!r}")

    def _token(self, challenge: Mapping[str, str]) -> str:
        realm = httpx.URL(challenge.get("realm", ""))
        is_own = self.repository.is_loopback and realm.host == self.origin.host
        if realm.scheme != "https" and not is_own:
            raise AccessRefused(
                f"it wants the login to be sent to {realm} without TLS: ask its operator to "
                f"use https"
            )
        asked = {
            "service": challenge.get("service", ""),
            "scope": f"repository:{self.repository.name}:{self._actions}",
        }
        login = self.login
        if login is not None and login.identity_token:
            form = {
                **asked,
                "grant_type": "refresh_token",
                "client_id": "pilotlight",
                "refresh_token": login.identity_token,
            }
            request = self.http.build_request("POST", realm, data=form)
            login = None
        else:
            request = self.http.build_request("GET", realm.copy_merge_params(asked))
        auth = httpx.BasicAuth(login.user, login.password) if login is not None else None
        answer = self.http.send(request, auth=auth, stream=True)
        try:
            if not answer.is_success:
                raise AccessRefused(
                    f"{realm.host} answered {answer.status_code}", status=answer.status_code
                )
            raw = bytearray()
            for piece in answer.iter_raw():
                raw += piece
                if len(raw) > _MAX_TOKEN_BYTES:
                    raise ValueError(f"more than {_MAX_TOKEN_BYTES} bytes")
            body: Any = json.loads(raw)
            return str(body.get("token") or body["access_token"])
        except (ValueError, RecursionError, KeyError, AttributeError, TypeError) as e:
            raise AccessRefused(f"{realm.host} returned no access token: {e!r}") from e
        finally:
            answer.close()
