"""Endpoints of the platform's processes: a Unix socket of this machine, or `https://host:port` in a
cluster, with mutual TLS.

Both ends of a TLS connection present a certificate of the platform's authority (`platform.tls_ca`);
without one a peer is rejected. Changed files are reloaded at the next handshake; established
connections continue. An unusable renewal (incomplete, of another key) is logged once and ignored:
the previous certificate stays in use until it expires."""

from __future__ import annotations

import asyncio
import logging
import socket as sockets
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit

from pilotlight.core.settings import Paths, PlatformSettings, SettingsInvalid
from pilotlight.core.transport.cookies import no_cookies
from pilotlight.core.transport.tls import CertificateInvalid, TlsFiles, explain_tls_error

if TYPE_CHECKING:
    import httpx

__all__ = ["CertificateInvalid", "Endpoint", "TlsCredentials", "TlsFiles", "controller_endpoint"]

log = logging.getLogger(__name__)

P = TypeVar("P", bound=asyncio.BaseProtocol)

HANDSHAKE_TIMEOUT_S = 10.0
_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Trusts no certificates, for transports without TLS. Without it each transport reads all
certificates of the machine: 30 ms, ten times at a start."""
_KEEPALIVE_OPTIONS: Final = (
    (sockets.IPPROTO_TCP, sockets.TCP_NODELAY, 1),
    (sockets.SOL_SOCKET, sockets.SO_KEEPALIVE, 1),
    (sockets.IPPROTO_TCP, sockets.TCP_KEEPIDLE, 10),
    (sockets.IPPROTO_TCP, sockets.TCP_KEEPINTVL, 5),
    (sockets.IPPROTO_TCP, sockets.TCP_KEEPCNT, 4),
    (sockets.IPPROTO_TCP, sockets.TCP_USER_TIMEOUT, 30_000),
)
"""tcp(7): a machine that vanished is detected after half a minute, and not only when a followed log
times out."""
_MAX_CONNECTIONS = 100
_MAX_KEPT_CONNECTIONS = 20


class TlsCredentials:
    """Our certificate and key, and the trusted authority. Any number of contexts may be created
    from them.

    Owner: none; handshakes may run in several threads, which at worst read the files twice."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises CertificateInvalid if the files are missing or unusable, or the certificate is
        expired or not valid yet."""
        self.files = files
        files.check()
        self._contexts: dict[bool, tuple[object, ssl.SSLContext]] = {}
        self._refused: object = None

    def __repr__(self) -> str:
        return f"<TlsCredentials {self.files.cert} of {self.files.ca}>"

    @classmethod
    def of(cls, settings: PlatformSettings) -> TlsCredentials | None:
        """The configured credentials; None if there are none. Raises CertificateInvalid."""
        files = TlsFiles.of(settings)
        return None if files is None else cls(files)

    def client_context(self) -> ssl.SSLContext:
        """A context for outgoing connections: the server's certificate must contain its name."""
        return _ReloadingSSLContext.made(
            ssl.PROTOCOL_TLS_CLIENT, partial(self._current, is_server=False)
        )

    def server_context(self) -> ssl.SSLContext:
        """A context for incoming connections: requires a client certificate of the authority."""
        return _ReloadingSSLContext.made(
            ssl.PROTOCOL_TLS_SERVER, partial(self._current, is_server=True)
        )

    def _current(self, *, is_server: bool) -> ssl.SSLContext:
        """The context of the current files, or of the previous ones if these are unusable."""
        state = self.files.state()
        known = self._contexts.get(is_server)
        if known is not None and known[0] == state:
            return known[1]
        try:
            self.files.check()
            context = _ssl_context(self.files, is_server=is_server)
        except (CertificateInvalid, ssl.SSLError, OSError) as e:
            if known is None:
                raise
            if self._refused != state:
                log.error("event=certificate_not_renewed the previous one stays in use error=%s", e)
            self._refused = state
            return known[1]
        if known is not None:
            log.info(
                "event=certificate_renewed file=%s side=%s",
                self.files.cert,
                "server" if is_server else "client",
            )
        self._contexts[is_server] = (state, context)
        return context


def _ssl_context(files: TlsFiles, *, is_server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3  # both ends are ours
    context.load_cert_chain(files.cert, files.key)
    context.load_verify_locations(files.ca)
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["http/1.1"])
    if is_server:
        # a resumed session would not present its certificate again, which may have expired
        context.num_tickets = 0
        context.sslobject_class = _AlertingSSLObject
    return context


class _AlertingSSLObject(ssl.SSLObject):
    """The server side of a handshake that sends the client the reason of a rejection.

    Event loops drop a connection whose handshake fails before the alert (RFC 8446, 6.2) is sent, so
    clients would not learn what is wrong with their certificate. Here the failure is delayed until
    the loop has sent the alert: the client disconnects, or the handshake times out."""

    outgoing: ssl.MemoryBIO
    _refusal: ssl.SSLError | None = None

    def do_handshake(self) -> None:
        if self._refusal is not None:
            raise self._refusal
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as e:
            log.warning("event=caller_refused %s", explain_tls_error(e, "a caller"))
            self._refusal = e
            if not self.outgoing.pending:
                raise  # there is no alert to send
            raise ssl.SSLWantReadError(ssl.SSL_ERROR_WANT_READ, "the refusal is on its way") from e


class _ReloadingSSLContext(ssl.SSLContext):
    """A context that is passed to servers and clients once, and uses the current files at each
    handshake."""

    current: Callable[[], ssl.SSLContext]

    @classmethod
    def made(cls, protocol: int, current: Callable[[], ssl.SSLContext]) -> _ReloadingSSLContext:
        current()  # report unusable files at startup
        made = cls(protocol)
        made.current = current
        return made

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        made = self.current().wrap_bio(*args, **kwargs)
        if isinstance(made, _AlertingSSLObject):
            made.outgoing = args[1]
        return made

    def wrap_socket(self, *args: Any, **kwargs: Any) -> ssl.SSLSocket:
        return self.current().wrap_socket(*args, **kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The address of one process. Either `socket`, or `host` and `port` with `credentials`."""

    socket: Path | None = None
    host: str = ""
    port: int = 0
    credentials: TlsCredentials | None = None

    @classmethod
    def at(cls, socket: Path) -> Endpoint:
        """A process of this machine."""
        return cls(socket=socket)

    @classmethod
    def parse(cls, text: str, credentials: TlsCredentials | None = None) -> Endpoint:
        """Parse a path, `unix:<path>`, or `https://host:port`. Raises ValueError naming the
        error."""
        if text.startswith(("/", "unix:/")):
            return cls(socket=Path(text.removeprefix("unix:")))
        host, port = parse_https_url(text)
        if credentials is None:
            raise ValueError(
                f"{text!r} needs mutual TLS: set platform.tls_cert, platform.tls_key and "
                f"platform.tls_ca"
            )
        return cls(host=host, port=port, credentials=credentials)

    def __str__(self) -> str:
        return str(self.socket) if self.socket is not None else self.base_url

    def __repr__(self) -> str:
        return f"<Endpoint {self}>"

    @property
    def base_url(self) -> str:
        """For an httpx client that uses `transport`. For a socket the host is a placeholder."""
        if self.socket is not None:
            return "http://local"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"https://{host}:{self.port}"

    def transport(self, *, limits: httpx.Limits | None = None) -> httpx.AsyncHTTPTransport:
        """A transport to this endpoint; closed with the client that uses it."""
        import httpx

        limits = limits or httpx.Limits(
            max_connections=_MAX_CONNECTIONS, max_keepalive_connections=_MAX_KEPT_CONNECTIONS
        )
        if self.socket is not None:
            return httpx.AsyncHTTPTransport(uds=str(self.socket), verify=_NO_TLS, limits=limits)
        assert self.credentials is not None
        from pilotlight.core.transport.explained_transport import ExplainedTransport

        return ExplainedTransport(
            str(self),
            verify=self.credentials.client_context(),
            limits=limits,
            trust_env=False,
            socket_options=_KEEPALIVE_OPTIONS,
        )

    def client(
        self,
        *,
        timeout: httpx.Timeout | float | None,
        headers: Mapping[str, str] | None = None,
        limits: httpx.Limits | None = None,
    ) -> httpx.AsyncClient:
        """Return an HTTP client of this process. It stores no cookies (`transport.cookies`)."""
        import httpx

        return httpx.AsyncClient(
            transport=self.transport(limits=limits),
            base_url=self.base_url,
            # forwarded requests name what their callers accept; without it, httpx would for them
            headers={"accept-encoding": "identity", **(headers or {})},
            timeout=timeout,
            cookies=no_cookies(),
        )

    async def connect(self, loop: asyncio.AbstractEventLoop, make: Callable[[], P]) -> P:
        """Open a connection with the caller's protocol. Raises OSError, which explains certificate
        errors."""
        if self.socket is not None:
            _, protocol = await loop.create_unix_connection(make, str(self.socket))
            return protocol
        assert self.credentials is not None
        context = self.credentials.client_context()
        try:
            transport, protocol = await loop.create_connection(
                make, self.host, self.port, ssl=context, ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S
            )
        except ssl.SSLError as e:
            raise ConnectionError(explain_tls_error(e, str(self))) from e
        for option in _KEEPALIVE_OPTIONS:
            transport.get_extra_info("socket").setsockopt(*option)
        return protocol


def parse_https_url(url: str) -> tuple[str, int]:
    """Parse `https://host:port`. Raises ValueError."""
    parts = urlsplit(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError as e:
        raise ValueError(f"{url!r}: {e}") from e
    if (
        parts.scheme != "https"
        or not host
        or parts.path not in ("", "/")
        or parts.query
        or parts.username is not None
    ):
        raise ValueError(f"{url!r}: write https://host:port, or the path of a Unix socket")
    return host, port or 443


def controller_endpoint(platform: PlatformSettings, paths: Paths) -> Endpoint:
    """The controller's endpoint: `platform.controller_url`, else its socket in <run>. Raises
    SettingsInvalid."""
    if platform.controller_url is None:
        return Endpoint.at(paths.socket("controller"))
    try:
        return Endpoint.parse(platform.controller_url, TlsCredentials.of(platform))
    except ValueError as e:
        raise SettingsInvalid(f"platform.controller_url = {e}") from e
