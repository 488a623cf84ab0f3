"""Where another process of the platform is: a Unix socket of this machine, or `https://host:port`
of a cluster, with mutual TLS.

Both ends of a TLS connection show a certificate of the platform's own authority
(`platform.tls_ca`): who has none is nobody. Files are read anew when they have changed, at the next
handshake; connections that stand go on. A renewal that cannot be used (half written, of another
key) is left alone and said once: the certificate before it stays in force until it ends."""

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

from pilotlight.core.cookies import no_cookies
from pilotlight.core.settings import Paths, PlatformSettings, SettingsInvalid
from pilotlight.core.tls import CertificateInvalid, TlsFiles, explain_tls_error

if TYPE_CHECKING:
    import httpx

__all__ = ["CertificateInvalid", "Endpoint", "TlsCredentials", "TlsFiles", "controller_endpoint"]

log = logging.getLogger(__name__)

P = TypeVar("P", bound=asyncio.BaseProtocol)

HANDSHAKE_TIMEOUT_S = 10.0
_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Trusts nobody, as nobody is asked. Without it each transport reads all certificates of the
machine: 30 ms, ten times at a start."""
_KEEPALIVE_OPTIONS: Final = (
    (sockets.IPPROTO_TCP, sockets.TCP_NODELAY, 1),
    (sockets.SOL_SOCKET, sockets.SO_KEEPALIVE, 1),
    (sockets.IPPROTO_TCP, sockets.TCP_KEEPIDLE, 10),
    (sockets.IPPROTO_TCP, sockets.TCP_KEEPINTVL, 5),
    (sockets.IPPROTO_TCP, sockets.TCP_KEEPCNT, 4),
    (sockets.IPPROTO_TCP, sockets.TCP_USER_TIMEOUT, 30_000),
)
"""tcp(7): a machine that vanished without a word is noticed after half a minute, not when a
followed log ends by its clock."""
_MAX_CONNECTIONS = 100
_MAX_KEPT_CONNECTIONS = 20


class TlsCredentials:
    """Our certificate and key, and the authority whose certificates we believe. Any number of
    contexts may be made of them.

    Owner: none; handshakes of one process may be in several threads, and at worst both read the
    files."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises CertificateInvalid when the files are not there, cannot be used, or their time is
        not now."""
        self.files = files
        files.check()
        self._contexts: dict[bool, tuple[object, ssl.SSLContext]] = {}
        self._refused: object = None

    def __repr__(self) -> str:
        return f"<TlsCredentials {self.files.cert} of {self.files.ca}>"

    @classmethod
    def of(cls, settings: PlatformSettings) -> TlsCredentials | None:
        """Those that are set; None where there are none. Raises CertificateInvalid."""
        files = TlsFiles.of(settings)
        return None if files is None else cls(files)

    def client_context(self) -> ssl.SSLContext:
        """For connections that we open: the other's name must be in its certificate."""
        return _ReloadingSSLContext.made(
            ssl.PROTOCOL_TLS_CLIENT, partial(self._current, is_server=False)
        )

    def server_context(self) -> ssl.SSLContext:
        """For connections that we accept: a certificate of the authority is demanded."""
        return _ReloadingSSLContext.made(
            ssl.PROTOCOL_TLS_SERVER, partial(self._current, is_server=True)
        )

    def _current(self, *, is_server: bool) -> ssl.SSLContext:
        """The context of the files as they are now, or of those before, if these cannot be used."""
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
                log.error("event=certificate_not_renewed the one before stays in force error=%s", e)
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
        # a resumed session would not show its certificate again, which may have ended meanwhile
        context.num_tickets = 0
        context.sslobject_class = _AlertingSSLObject
    return context


class _AlertingSSLObject(ssl.SSLObject):
    """A server's side of a handshake that tells the other why it is refused.

    Event loops drop a connection whose handshake fails, with the alert (RFC 8446, 6.2) still
    unsent, and callers would never learn what is wrong with their certificate. Here the failure
    waits until the loop has sent what there is: the other leaves, or its time ends."""

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
                raise  # there is nothing to tell
            raise ssl.SSLWantReadError(ssl.SSL_ERROR_WANT_READ, "the refusal is on its way") from e


class _ReloadingSSLContext(ssl.SSLContext):
    """Stands where a context is asked for once and for all, and makes each handshake of what is
    current."""

    current: Callable[[], ssl.SSLContext]

    @classmethod
    def made(cls, protocol: int, current: Callable[[], ssl.SSLContext]) -> _ReloadingSSLContext:
        current()  # what cannot be used is found at the start
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
    """One process. Either `socket`, or `host` and `port` with `credentials`."""

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
        """A path, `unix:<path>`, or `https://host:port`. Raises ValueError, saying what is wrong
        with `text`."""
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
        """For an httpx client that uses `transport`. Over a socket the host says nothing."""
        if self.socket is not None:
            return "http://local"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"https://{host}:{self.port}"

    def transport(self, *, limits: httpx.Limits | None = None) -> httpx.AsyncHTTPTransport:
        """Connections to it; closed with the client that uses them."""
        import httpx

        limits = limits or httpx.Limits(
            max_connections=_MAX_CONNECTIONS, max_keepalive_connections=_MAX_KEPT_CONNECTIONS
        )
        if self.socket is not None:
            return httpx.AsyncHTTPTransport(uds=str(self.socket), verify=_NO_TLS, limits=limits)
        assert self.credentials is not None
        from pilotlight.core.tls_transport import ExplainedTransport

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
        """Return an HTTP client of this process. It stores no cookies; see `core.cookies`."""
        import httpx

        return httpx.AsyncClient(
            transport=self.transport(limits=limits),
            base_url=self.base_url,
            headers=headers,
            timeout=timeout,
            cookies=no_cookies(),
        )

    async def connect(self, loop: asyncio.AbstractEventLoop, make: Callable[[], P]) -> P:
        """One connection for a protocol of the caller's own. Raises OSError, which says why where
        it is the certificates."""
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
    """Of `https://host:port`. Raises ValueError."""
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
    """Where the controller is: `platform.controller_url`, else its socket in <run>. Raises
    SettingsInvalid."""
    if platform.controller_url is None:
        return Endpoint.at(paths.socket("controller"))
    try:
        return Endpoint.parse(platform.controller_url, TlsCredentials.of(platform))
    except ValueError as e:
        raise SettingsInvalid(f"platform.controller_url = {e}") from e
