"""Where processes are, and mutual TLS between them: over real sockets, with certificates of the
test's own authority."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from pilotlight.core.settings import Paths, PlatformSettings, SettingsInvalid
from pilotlight.core.transport.endpoint import (
    CertificateInvalid,
    Endpoint,
    TlsCredentials,
    TlsFiles,
    controller_endpoint,
)
from pilotlight.core.transport.tls import explain_tls_error
from tests.fakes.authority import HOUR, Authority

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(ANSWER)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
        pass
    finally:
        writer.close()


@asynccontextmanager
async def _serving(context: ssl.SSLContext) -> AsyncIterator[int]:
    server = await asyncio.start_server(_answer, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await server.wait_closed()


@asynccontextmanager
async def _asking(
    port: int, credentials: TlsCredentials | None, host: str = "127.0.0.1"
) -> AsyncIterator[httpx.AsyncClient]:
    address = Endpoint.parse(f"https://{host}:{port}", credentials)
    async with httpx.AsyncClient(
        transport=address.transport(), base_url=address.base_url, timeout=30
    ) as client:
        yield client


@pytest.fixture(name="authority", scope="module")
def _authority() -> Authority:
    return Authority()


@pytest.fixture(name="server")
def _server(authority: Authority, tmp_path: Path) -> TlsCredentials:
    return TlsCredentials(authority.issue(tmp_path / "server", "localhost", "127.0.0.1"))


@pytest.fixture(name="client")
def _client(authority: Authority, tmp_path: Path) -> TlsCredentials:
    return TlsCredentials(authority.issue(tmp_path / "client", "client"))


# -- addresses -------------------------------------------------------------------------------------
def test_a_path_is_a_socket_of_this_machine() -> None:
    for text in ("/run/c.sock", "unix:/run/c.sock"):
        address = Endpoint.parse(text)
        assert (address.socket, address.base_url, repr(address)) == (
            Path("/run/c.sock"),
            "http://local",
            "<Endpoint /run/c.sock>",
        )


def test_a_url_names_host_and_port(client: TlsCredentials) -> None:
    address = Endpoint.parse("https://[::1]:8443", client)
    assert (address.host, address.port, address.base_url) == ("::1", 8443, "https://[::1]:8443")


@pytest.mark.parametrize(
    "text",
    [
        "http://c:1",
        "https://",
        "https://c:1/x",
        "https://u@c:1",
        "https://c:port",
        "c.sock",
        "https://c:1?x=1",
    ],
)
def test_what_is_no_address_is_refused_by_name(text: str, client: TlsCredentials) -> None:
    with pytest.raises(ValueError, match=r"https://host:port|ort could not be cast"):
        Endpoint.parse(text, client)


def test_another_machine_needs_certificates() -> None:
    with pytest.raises(ValueError, match=r"platform\.tls_cert"):
        Endpoint.parse("https://c:1")


def test_the_controller_is_behind_its_socket_unless_a_url_is_set(
    tmp_path: Path, client: TlsCredentials
) -> None:
    paths = Paths(home=tmp_path, run=tmp_path)
    assert controller_endpoint(PlatformSettings(), paths).socket == tmp_path / "controller.sock"
    files: dict[str, Any] = {
        "tls_cert": str(client.files.cert),
        "tls_key": str(client.files.key),
        "tls_ca": str(client.files.ca),
    }
    assert (
        str(controller_endpoint(PlatformSettings(controller_url="https://c:8443", **files), paths))
        == "https://c:8443"
    )
    with pytest.raises(SettingsInvalid, match=r"platform\.controller_url = 'https://c:8443/x'"):
        controller_endpoint(PlatformSettings(controller_url="https://c:8443/x", **files), paths)


def test_half_of_the_files_is_refused() -> None:
    with pytest.raises(ValueError, match="tls_key and tls_ca is missing"):
        PlatformSettings(tls_cert="/c")
    with pytest.raises(ValueError, match="needs tls_cert"):
        PlatformSettings(controller_url="https://c:1")


# -- handshakes ------------------------------------------------------------------------------------
async def test_both_know_each_other(server: TlsCredentials, client: TlsCredentials) -> None:
    async with _serving(server.server_context()) as port, _asking(port, client) as http:
        assert (await http.get("/")).text == "ok"


async def test_a_protocol_of_our_own_connects_too(
    server: TlsCredentials, client: TlsCredentials
) -> None:
    class Once(asyncio.Protocol):
        def __init__(self) -> None:
            self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            self.transport = transport
            transport.write(b"GET / HTTP/1.1\r\n\r\n")

        def data_received(self, data: bytes) -> None:
            self.done.set_result(data)

    async with _serving(server.server_context()) as port:
        protocol = await Endpoint.parse(f"https://localhost:{port}", client).connect(
            asyncio.get_running_loop(), Once
        )
        assert await protocol.done == ANSWER
        protocol.transport.abort()


async def test_a_caller_without_a_certificate_is_refused_and_told_why(
    server: TlsCredentials, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        _serving(server.server_context()) as port,
        httpx.AsyncClient(verify=authority.nameless_context()) as http,
    ):
        with pytest.raises(ssl.SSLError) as caught:
            await http.get(f"https://127.0.0.1:{port}/")
    assert "it requires a certificate and we sent none" in explain_tls_error(caught.value, "x")
    assert "event=caller_refused a caller: it sent no certificate" in caplog.text


async def test_a_certificate_of_another_authority_is_refused_by_both(
    server: TlsCredentials, authority: Authority, tmp_path: Path
) -> None:
    stranger = Authority("another")
    blind = TlsCredentials(
        stranger.issue(tmp_path / "blind", "client")
    )  # believes the stranger alone
    # believes ours, is the stranger's
    duped = TlsCredentials(stranger.issue(tmp_path / "duped", "client", ca=authority))
    async with _serving(server.server_context()) as port:
        async with _asking(port, blind) as http:
            with pytest.raises(
                httpx.ConnectError, match=r"an authority that we do not trust: platform\.tls_ca"
            ):
                await http.get("/")
        async with _asking(port, duped) as http:
            with pytest.raises(
                httpx.ConnectError, match="it does not trust the authority of our certificate"
            ):
                await http.get("/")


async def test_another_name_is_refused(
    server: TlsCredentials, authority: Authority, client: TlsCredentials, tmp_path: Path
) -> None:
    elsewhere = TlsCredentials(authority.issue(tmp_path / "elsewhere", "controller.other"))
    async with _serving(elsewhere.server_context()) as port, _asking(port, client) as http:
        with pytest.raises(httpx.ConnectError, match="for another name"):
            await http.get("/")


async def test_an_older_tls_is_refused(server: TlsCredentials, client: TlsCredentials) -> None:
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    old.load_cert_chain(client.files.cert, client.files.key)
    old.load_verify_locations(client.files.ca)
    async with _serving(server.server_context()) as port:
        with pytest.raises(ssl.SSLError) as caught:
            await asyncio.open_connection("127.0.0.1", port, ssl=old)
    assert "does not support TLS 1.3" in explain_tls_error(caught.value, "x")


async def test_a_port_without_tls_is_named_as_one(client: TlsCredentials) -> None:
    async def rude(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(ANSWER)
        await writer.drain()
        writer.close()

    plain = await asyncio.start_server(rude, "127.0.0.1", 0)
    async with plain, _asking(plain.sockets[0].getsockname()[1], client) as http:
        with pytest.raises(httpx.ConnectError, match="does not use TLS on that port"):
            await http.get("/")


async def test_whose_time_is_over_is_said(
    server: TlsCredentials, authority: Authority, client: TlsCredentials, tmp_path: Path
) -> None:
    for starts, ends, words in (
        (-2 * HOUR, -HOUR, "has expired"),
        (HOUR, 2 * HOUR, "clocks differ"),
    ):
        files = authority.issue(tmp_path / words, "127.0.0.1", starts=starts, ends=ends)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files.cert, files.key)
        async with _serving(context) as port, _asking(port, client) as http:
            with pytest.raises(httpx.ConnectError, match=words):
                await http.get("/")


def _break_off(listener: socket.socket, context: ssl.SSLContext) -> None:
    """One answer, in the middle of which the connection no longer carries TLS."""
    accepted, _ = listener.accept()
    tls = context.wrap_socket(accepted, server_side=True)
    tls.recv(4096)
    tls.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf")
    with socket.socket(fileno=tls.detach()) as plain:
        plain.sendall(b"no TLS record at all, by any reading of RFC 8446" * 10)
        plain.shutdown(socket.SHUT_WR)
        plain.recv(4096)


async def test_a_connection_that_breaks_in_the_middle_of_an_answer_is_httpxs_error(
    server: TlsCredentials, client: TlsCredentials
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        breaking = asyncio.create_task(
            asyncio.to_thread(_break_off, listener, server.server_context())
        )
        async with _asking(listener.getsockname()[1], client) as http:
            with pytest.raises(httpx.ReadError, match="does not use TLS on that port"):
                await http.get("/")
        await breaking


# -- renewal ---------------------------------------------------------------------------------------
async def test_renewed_files_are_taken_up_and_what_stands_goes_on(
    server: TlsCredentials, client: TlsCredentials, authority: Authority, tmp_path: Path
) -> None:
    successor = Authority("successor")
    async with _serving(server.server_context()) as port, _asking(port, client) as before:
        assert (await before.get("/")).text == "ok"
        successor.issue(server.files.cert.parent, "127.0.0.1")
        async with _asking(port, client) as late:
            with pytest.raises(httpx.ConnectError, match=r"platform\.tls_ca differs"):
                await late.get("/")
        successor.issue(client.files.cert.parent, "client")
        async with _asking(port, client) as late:
            assert (await late.get("/")).text == "ok"
        assert (await before.get("/")).text == "ok"  # on the connection of the old certificates


async def test_a_client_that_lives_takes_its_renewed_certificate_up(
    server: TlsCredentials, client: TlsCredentials, authority: Authority, tmp_path: Path
) -> None:
    successor = Authority("successor")
    async with _asking(1, client) as http:
        successor.issue(server.files.cert.parent, "127.0.0.1")
        successor.issue(client.files.cert.parent, "client")
        async with _serving(server.server_context()) as port:
            assert (await http.get(f"https://127.0.0.1:{port}/")).text == "ok"
            await http.aclose()  # from Python 3.12 a server waits for its connections to end


async def test_a_renewal_that_does_not_fit_leaves_the_one_before_in_force(
    server: TlsCredentials,
    client: TlsCredentials,
    authority: Authority,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with _serving(server.server_context()) as port:
        other = authority.issue(tmp_path / "other", "127.0.0.1")
        server.files.key.write_bytes(other.key.read_bytes())
        for _ in range(2):
            async with _asking(port, client) as http:
                assert (await http.get("/")).text == "ok"
        assert caplog.text.count("certificate_not_renewed") == 1
        server.files.cert.write_bytes(other.cert.read_bytes())
        async with _asking(port, client) as http:
            assert (await http.get("/")).text == "ok"


# -- files that cannot be used ---------------------------------------------------------------------
def _without_key(files: TlsFiles) -> None:
    files.key.unlink()


def _other_key(files: TlsFiles) -> None:
    Authority().issue(files.key.parent / "x", "x").key.replace(files.key)


def _no_pem(files: TlsFiles) -> None:
    files.cert.write_text("nothing")


def _no_ca(files: TlsFiles) -> None:
    files.ca.write_text("nothing")


@pytest.mark.parametrize(
    "spoil, message",
    [
        (_without_key, r"platform\.tls_key = .*No such file or directory: is the secret mounted\?"),
        (_other_key, r"platform\.tls_key = .*is not the key of the certificate"),
        (_no_pem, r"platform\.tls_cert = .*contains no PEM certificate"),
        (_no_ca, r"platform\.tls_ca = .*contains no PEM certificate"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    spoil: Callable[[TlsFiles], None], message: str, authority: Authority, tmp_path: Path
) -> None:
    files = authority.issue(tmp_path, "a")
    spoil(files)
    with pytest.raises(CertificateInvalid, match=message):
        TlsCredentials(files)


def test_a_certificate_is_for_a_time(authority: Authority, tmp_path: Path) -> None:
    files = authority.issue(tmp_path, "a")
    now = datetime.now(UTC)
    files.check(now)
    with pytest.raises(CertificateInvalid, match=r"expired .* UTC: renew it"):
        files.check(now + timedelta(hours=2))
    with pytest.raises(
        CertificateInvalid, match=r"not valid for another \d+ s .*is this machine's clock behind\?"
    ):
        files.check(now - timedelta(hours=2))
