"""Credentials for the API server: the pod's service account, or a kubeconfig.

The kubelet replaces a pod's token long before it expires, so token files are re-read periodically;
an `exec` plugin runs again when its token expires. A 401 triggers both at once
(`Credentials.renew`)."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from pilotlight.kubernetes.errors import BadCredentials
from pilotlight.kubernetes.official_client import (
    ConfigException,
    Configuration,
    KubeConfigLoader,
    KubeConfigMerger,
)
from pilotlight.kubernetes.settings import ClusterSettings

logger = logging.getLogger(__name__)

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_REREAD_S = 30.0  # kubelet replaces a token in the last fifth of its life (of at least 10 min)


class TokenFile:
    """A token file that another process refreshes. Owner: one event loop; reads are of a few
    hundred bytes."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._token = self._read()
        self._read_at = clock()

    def __repr__(self) -> str:
        return f"<TokenFile {self._path}>"

    @property
    def token(self) -> str:
        """The latest token; the last valid one while the file is being replaced."""
        if self._clock() - self._read_at >= _REREAD_S:
            self.renew()
        return self._token

    def renew(self) -> None:
        """Read the file now."""
        self._read_at = self._clock()
        try:
            self._token = self._read()
        except BadCredentials as error:
            logger.warning("token not read error=%s", error)

    def _read(self) -> str:
        try:
            token = self._path.read_text("ascii").strip()
        except (OSError, ValueError) as error:
            raise BadCredentials(
                f"cannot read the token {self._path}: {error}. Check that a service account is "
                f"mounted"
            ) from error
        if not token:
            raise BadCredentials(f"the token file {self._path} is empty")
        return token


class Credentials:
    """The API server's address and our credentials. `configuration` is the client's own type."""

    def __init__(
        self,
        configuration: Any,
        *,
        source: str,
        token_file: TokenFile | None = None,
        loader: Any = None,
    ) -> None:
        self.configuration = configuration
        self.source = source
        self._token_file = token_file
        self._loader = loader
        # Chain and name are checked, but not strict RFC 5280 conformance (Python 3.13's default),
        # which many clusters' own authorities do not meet.
        configuration.disable_strict_ssl_verification = True
        if token_file is not None:
            configuration.api_key["BearerToken"] = f"Bearer {token_file.token}"
        configuration.refresh_api_key_hook = self._refresh

    def __repr__(self) -> str:
        return f"<Credentials {self.source} at {self.configuration.host}>"

    async def renew(self) -> None:
        """Renew the credentials at once: the API server did not accept the current ones."""
        if self._token_file is not None:
            self._token_file.renew()
        elif self._loader is not None:
            # otherwise the plugin would not run again
            self._loader.__dict__.pop("exec_plugin_expiry", None)
            await _authenticate(self._loader, self.configuration, self.source)

    async def _refresh(self, configuration: Any) -> None:
        if self._token_file is not None:
            configuration.api_key["BearerToken"] = f"Bearer {self._token_file.token}"
        elif self._loader is not None and hasattr(self._loader, "exec_plugin_expiry"):
            await _authenticate(self._loader, configuration, self.source)


async def find_credentials(
    settings: ClusterSettings,
    *,
    environ: Mapping[str, str] | None = None,
    service_account: Path = SERVICE_ACCOUNT,
) -> Credentials:
    """Find credentials: the configured kubeconfig, else the pod's service account, else
    $KUBECONFIG, else ~/.kube/config.

    Raises:
        BadCredentials: there are none, or they cannot be read.
    """
    environ = os.environ if environ is None else environ
    if settings.kubeconfig is not None:
        return await _of_kubeconfig(settings.kubeconfig, settings.context)
    if environ.get("KUBERNETES_SERVICE_HOST") and (service_account / "token").exists():
        return _of_pod(environ, service_account)
    paths = environ.get("KUBECONFIG") or str(
        Path(environ.get("HOME") or "~").expanduser() / ".kube" / "config"
    )
    return await _of_kubeconfig(paths, settings.context)


def _of_pod(environ: Mapping[str, str], directory: Path) -> Credentials:
    host, port = environ["KUBERNETES_SERVICE_HOST"], environ.get("KUBERNETES_SERVICE_PORT") or "443"
    configuration = Configuration()
    configuration.host = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    configuration.ssl_ca_cert = str(directory / "ca.crt")
    return Credentials(
        configuration, source="service account", token_file=TokenFile(directory / "token")
    )


async def _of_kubeconfig(paths: str, context: str | None) -> Credentials:
    existing = [
        path for path in paths.split(os.pathsep) if path and Path(path).expanduser().exists()
    ]
    if not existing:
        raise BadCredentials(
            f"no kubeconfig at {paths}: set cluster.kubeconfig in platform.yaml, or KUBECONFIG"
        )
    configuration = Configuration()
    try:
        merged = KubeConfigMerger(os.pathsep.join(existing))
        loader = KubeConfigLoader(
            config_dict=merged.config, active_context=context, config_base_path=None
        )
    except (
        ConfigException,
        yaml.YAMLError,
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
    ) as error:
        raise BadCredentials(f"kubeconfig {paths}: {error}") from error
    source = f"kubeconfig {paths}"
    await _authenticate(loader, configuration, source)
    return Credentials(configuration, source=source, token_file=_token_file(loader), loader=loader)


async def _authenticate(loader: Any, configuration: Any, source: str) -> None:
    try:
        await loader.load_and_set(configuration)
    except (ConfigException, OSError, ValueError, TypeError) as error:
        raise BadCredentials(f"{source}: {error}") from error


def _token_file(loader: Any) -> TokenFile | None:
    # the client has no public access to the chosen user, and reads `tokenFile` only once
    user = loader._user
    path = user.safe_get("tokenFile") if user else None
    if path is None or user.safe_get("token"):
        return None
    base = Path(user.path).parent if user.path else Path()
    return TokenFile(base / path)
