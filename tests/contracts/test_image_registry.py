"""Pushes to a real registry (Debian's docker-registry): what arrives, what is not sent again, which
logins are used, and what a refusal says."""

from __future__ import annotations

import datetime as dt
import json
import os
import socket
import stat
import threading
import urllib.parse
import uuid
from base64 import b64decode, b64encode, urlsafe_b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.x509.oid import NameOID

from pilotlight.core.oci.image_reference import Repository, parse_repository
from pilotlight.core.oci.registry_login import Login
from pilotlight.errors import (
    Forbidden,
    InvalidInput,
    Unauthenticated,
    Unavailable,
)
from pilotlight.packaging.oci.registry import Registry
from pilotlight.packaging.oci.registry_login import find_login
from tests.fakes.authority import Authority
from tests.fakes.image_registry import PASSWORD, USER, ImageRegistry, make_layout
from tests.fakes.image_registry import image_registry as serve_images


@pytest.fixture
def repository(image_registry: ImageRegistry) -> Repository:
    return parse_repository(f"{image_registry.host}/functions/acme-{uuid.uuid4().hex[:8]}")


def push(
    repository: Repository, layout: Path, environ: Mapping[str, str], **options: object
) -> list[tuple[int, int]]:
    """Push, and return the reported progress."""
    said: list[tuple[int, int]] = []
    login = find_login(repository, environ)
    with Registry(repository, login, pause=lambda _: None) as registry:
        registry.push(layout, tag="latest", sent=lambda *sent: said.append(sent))
    return said


def test_what_was_pushed_is_there_by_its_digest_and_is_not_sent_again(
    image_registry: ImageRegistry, repository: Repository, tmp_path: Path
) -> None:
    digest = make_layout(tmp_path / "one", os.urandom(600_000), "second")
    said = push(repository, tmp_path / "one", image_registry.environ())
    total = said[-1][1]
    assert said[-1] == (total, total)
    assert 0 < said[1][0] < total
    document = image_registry.manifest(f"{repository}@{digest}")
    kept = json.loads((tmp_path / "one/blobs/sha256" / digest[7:]).read_bytes())
    assert document == kept
    assert image_registry.uploads(repository.name) == 3  # two layers and the configuration

    assert push(repository, tmp_path / "one", image_registry.environ()) == []
    make_layout(tmp_path / "two", "third", "second")
    push(repository, tmp_path / "two", image_registry.environ())
    assert image_registry.uploads(repository.name) == 3 + 2  # the equal layer is there


def test_without_a_login_or_with_a_wrong_one_it_says_how_to_log_in(
    image_registry: ImageRegistry, repository: Repository, tmp_path: Path
) -> None:
    make_layout(tmp_path / "image", "text")
    with pytest.raises(
        Unauthenticated, match=f"not logged in to registry {image_registry.host}"
    ) as e:
        push(repository, tmp_path / "image", {"HOME": str(tmp_path)})
    assert e.value.detail["hint"].startswith(f"Run `docker login {image_registry.host}`")
    with (
        Registry(repository, Login(user=USER, password="wrong")) as registry,
        pytest.raises(Unauthenticated, match="does not accept the login of ada"),
    ):
        registry.push(tmp_path / "image", tag="latest")


def test_a_damaged_blob_is_refused_with_the_registrys_own_words(
    image_registry: ImageRegistry, repository: Repository, tmp_path: Path
) -> None:
    make_layout(tmp_path / "image", "text")
    blobs = tmp_path / "image/blobs/sha256"
    layer = min(blobs.iterdir(), key=lambda blob: blob.read_bytes()[:1] != b"\x1f")
    layer.write_bytes(layer.read_bytes()[:-1] + b"?")
    with pytest.raises(InvalidInput, match="400 provided digest did not match"):
        push(repository, tmp_path / "image", image_registry.environ())


@contextmanager
def cutting_proxy(to: str, *, cuts: int) -> Iterator[str]:
    """Forwards connections to a registry, and cuts the first `cuts` after 64 KiB of a blob. Its
    address."""
    left, threads = [cuts], list[threading.Thread]()

    def send(client: socket.socket, upstream: socket.socket) -> None:
        done, is_upload = 0, False
        while data := client.recv(65536):
            is_upload = is_upload or data.startswith(b"PUT")
            done += len(data) if is_upload else 0
            if left[0] and done >= 65536:
                left[0] -= 1
                client.shutdown(socket.SHUT_RDWR)
                break
            upstream.sendall(data)
        upstream.shutdown(socket.SHUT_WR)

    def forward(client: socket.socket) -> None:
        with (
            client,
            socket.create_connection(("127.0.0.1", int(to.rpartition(":")[2]))) as upstream,
        ):
            sending = threading.Thread(target=send, args=(client, upstream))
            sending.start()
            with suppress(OSError):
                while data := upstream.recv(65536):
                    client.sendall(data)
            sending.join()

    def serve() -> None:
        with suppress(OSError):
            while True:
                threads.append(threading.Thread(target=forward, args=(listener.accept()[0],)))
                threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threads.append(threading.Thread(target=serve))
        threads[0].start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join()
    assert left[0] < cuts


@pytest.mark.parametrize("cuts", [2, 1000])
def test_a_connection_that_breaks_is_tried_again_and_not_for_ever(
    image_registry: ImageRegistry, repository: Repository, tmp_path: Path, cuts: int
) -> None:
    digest = make_layout(tmp_path / "image", os.urandom(1_000_000))
    login = Login(user=USER, password=PASSWORD)
    with cutting_proxy(image_registry.host, cuts=cuts) as address:
        through = Repository(address, repository.name)
        with Registry(through, login, pause=lambda _: None) as registry:
            if cuts == 2:
                assert registry.push(tmp_path / "image", tag="latest") == digest
                assert image_registry.manifest(f"{image_registry.host}/{repository.name}@{digest}")
            else:
                with pytest.raises(Unavailable, match=f"registry {address} does not answer"):
                    registry.push(tmp_path / "image", tag="latest")


@pytest.mark.parametrize("where", ["credHelpers", "credsStore"])
def test_a_credential_helper_is_asked(
    image_registry: ImageRegistry, repository: Repository, tmp_path: Path, where: str
) -> None:
    helper = tmp_path / "docker-credential-test"
    body = json.dumps({"ServerURL": "", "Username": USER, "Secret": PASSWORD})
    helper.write_text(
        f'#!/bin/sh\nread -r server\n[ "$1 $server" = "get {image_registry.host}" ] || exit 1\n'
        f"echo '{body}'\n"
    )
    helper.chmod(0o755)
    value = {image_registry.host: "test"} if where == "credHelpers" else "test"
    (tmp_path / "config.json").write_text(json.dumps({where: value}))
    environ = {"DOCKER_CONFIG": str(tmp_path), "PATH": f"{tmp_path}:/usr/bin:/bin"}
    make_layout(tmp_path / "image", "text")
    assert push(repository, tmp_path / "image", environ)
    helper.chmod(stat.S_IRUSR)
    with pytest.raises(InvalidInput, match="credential helper docker-credential-test of registry"):
        find_login(repository, environ)
    if where == "credsStore":
        other = Repository("other.example", "x")
        helper.chmod(0o755)
        assert find_login(other, environ) is None


@pytest.mark.parametrize(
    "key", ["registry.example/team", "registry.example", "https://registry.example"]
)
def test_logins_are_found_where_docker_and_podman_keep_them(tmp_path: Path, key: str) -> None:
    file = tmp_path / "containers" / "auth.json"
    file.parent.mkdir()
    file.write_text(json.dumps({"auths": {key: {"auth": "YWRhOnM6cw=="}, "x": {}}}))
    environ = {"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)}
    found = find_login(Repository("registry.example", "team/acme"), environ)
    assert found == Login(user="ada", password="s:s")
    assert find_login(Repository("registry.example:5000", "team/acme"), environ) is None
    file.write_text('{"auths": {"registry.example": {"auth": "?"}}}')
    with pytest.raises(InvalidInput, match="is not base64 of user:password"):
        find_login(Repository("registry.example", "team/acme"), environ)


# -- access tokens ---------------------------------------------------------------------------------
class TokenIssuer:
    """Issues access tokens to USER with PASSWORD, as the registries of most providers do."""

    def __init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "issuer")])
        now = dt.datetime.now(dt.UTC)
        self.certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(self.key.public_key())
            .serial_number(1)
            .not_valid_before(now - dt.timedelta(hours=1))
            .not_valid_after(now + dt.timedelta(hours=1))
            .sign(self.key, hashes.SHA256())
        )
        self.actions = ["pull", "push"]

    def token(self, query: Mapping[str, list[str]]) -> str:
        """A JSON Web Token (RFC 7519) for the requested repository."""
        kind, _, rest = query["scope"][0].partition(":")
        der = self.certificate.public_bytes(serialization.Encoding.DER)
        head = {"typ": "JWT", "alg": "ES256", "x5c": [b64encode(der).decode()]}
        now = int(dt.datetime.now(dt.UTC).timestamp())
        claims = {
            "iss": "issuer",
            "sub": USER,
            "aud": query["service"][0],
            "exp": now + 60,
            "nbf": now - 60,
            "iat": now,
            "jti": uuid.uuid4().hex,
            "access": [{"type": kind, "name": rest.rpartition(":")[0], "actions": self.actions}],
        }
        signed = f"{_part(json.dumps(head).encode())}.{_part(json.dumps(claims).encode())}"
        r, s = decode_dss_signature(self.key.sign(signed.encode(), ec.ECDSA(hashes.SHA256())))
        return f"{signed}.{_part(r.to_bytes(32, 'big') + s.to_bytes(32, 'big'))}"


def _part(raw: bytes) -> str:
    return urlsafe_b64encode(raw).decode().rstrip("=")


@pytest.fixture(scope="module")
def token_registry(
    tmp_path_factory: pytest.TempPathFactory, image_registry: ImageRegistry
) -> Iterator[tuple[ImageRegistry, TokenIssuer]]:
    """A registry that wants access tokens, and their issuer."""
    issuer, directory = TokenIssuer(), tmp_path_factory.mktemp("tokens")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            given = self.headers.get("authorization", "").partition(" ")[2]
            if b64decode(given).decode() != f"{USER}:{PASSWORD}":
                self.send_error(401)
                return
            query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
            body = json.dumps({"token": issuer.token(query)}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    (directory / "issuer.pem").write_bytes(
        issuer.certificate.public_bytes(serialization.Encoding.PEM)
    )
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        realm = f"http://127.0.0.1:{server.server_address[1]}/token"
        auth = (
            f"{{token: {{realm: '{realm}', service: tests, issuer: issuer, "
            f"rootcertbundle: {directory / 'issuer.pem'}}}}}"
        )
        try:
            with serve_images(directory, auth=auth) as running:
                yield running, issuer
        finally:
            server.shutdown()
            thread.join()


def test_a_login_is_exchanged_for_access_tokens(
    token_registry: tuple[ImageRegistry, TokenIssuer], tmp_path: Path
) -> None:
    registry, issuer = token_registry
    repository = parse_repository(f"{registry.host}/acme")
    make_layout(tmp_path / "image", "text", "more")
    assert push(repository, tmp_path / "image", registry.environ())
    assert push(repository, tmp_path / "image", registry.environ()) == []
    issuer.actions = ["pull"]
    make_layout(tmp_path / "other", "other")
    with pytest.raises(Forbidden, match="does not accept blobs: 401 authentication required") as e:
        push(repository, tmp_path / "other", registry.environ())
    assert e.value.detail["hint"] == f"Ask its operator for the right to push to {repository}."
    with pytest.raises(Unauthenticated, match="not logged in"):
        push(repository, tmp_path / "other", {"HOME": str(tmp_path)})


# -- TLS -------------------------------------------------------------------------------------------
def test_only_a_registry_on_this_machine_is_asked_without_tls(
    image_registry: ImageRegistry, tmp_path: Path
) -> None:
    make_layout(tmp_path / "image", "text")
    port = image_registry.host.rpartition(":")[2]
    for host, is_loopback in (
        (f"localhost:{port}", True),
        ("[::1]:5000", True),
        ("127.0.0.2", True),
        ("registry.example:5000", False),
        ("127.0.0.1.example", False),
        ("localhost.example", False),
    ):
        repository = Repository(host, "acme")
        assert repository.is_loopback is is_loopback
        with Registry(repository, None) as registry:
            assert repr(registry).startswith(
                f"<Registry {'http' if is_loopback else 'https'}://{host}/"
            )


def test_a_registry_is_trusted_as_this_machine_trusts_its_authority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *more, **named: resolve(
            "127.0.0.1" if host == "registry.test" else host, *more, **named
        ),
    )
    make_layout(tmp_path / "image", "text")
    login = Login(user=USER, password=PASSWORD)
    tls = Authority().issue(tmp_path / "tls", "registry.test", "127.0.0.1")
    with serve_images(tmp_path, tls=tls) as running:
        repository = Repository(f"registry.test:{running.host.rpartition(':')[2]}", "acme")
        with (
            Registry(repository, login, pause=lambda _: pytest.fail("tried again")) as registry,
            pytest.raises(Unavailable, match=r"certificate of registry .* is not trusted") as e,
        ):
            registry.check_login()
        assert "SSL_CERT_FILE" in e.value.detail["hint"]
        monkeypatch.setenv("SSL_CERT_FILE", str(tls.ca))
        with Registry(repository, login) as registry:
            digest = registry.push(tmp_path / "image", tag="latest")
            assert registry.has_image(digest)


class Elsewhere:
    """A registry that sends uploads, or whoever needs a token, to other places; what it received."""

    def __init__(self) -> None:
        self.location = self.challenge = ""
        self.received: list[tuple[str, str, str]] = []

    @contextmanager
    def served(self) -> Iterator[str]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                login = self.headers.get("authorization", "")
                outer.received.append((self.command, self.headers["host"], login))
                self.rfile.read(int(self.headers.get("content-length", 0)))
                challenge = outer.challenge or ("" if login else 'Basic realm="test"')
                if challenge and self.headers["host"].endswith(outer.port):
                    self.send_response(401)
                    self.send_header("www-authenticate", challenge)
                else:
                    self.send_response({"HEAD": 404, "POST": 202, "PUT": 400}[self.command])
                    self.send_header("location", outer.location)
                self.end_headers()

            def do_HEAD(self) -> None:
                self.answer()

            def do_POST(self) -> None:
                self.answer()

            def do_PUT(self) -> None:
                self.answer()

            def log_message(self, format: str, *args: object) -> None:
                pass

        with (
            ThreadingHTTPServer(("127.0.0.1", 0), Handler) as first,
            ThreadingHTTPServer(("127.0.0.1", 0), Handler) as second,
        ):
            self.port, self.other = (str(one.server_address[1]) for one in (first, second))
            threads = [threading.Thread(target=one.serve_forever) for one in (first, second)]
            for thread in threads:
                thread.start()
            yield f"127.0.0.1:{self.port}"
            for one, thread in zip((first, second), threads, strict=True):
                one.shutdown()
                thread.join()


def test_a_login_is_sent_nowhere_else_and_not_in_plain_text(tmp_path: Path) -> None:
    make_layout(tmp_path / "image", "text")
    elsewhere, login = Elsewhere(), Login(user=USER, password=PASSWORD)
    with elsewhere.served() as host, Registry(Repository(host, "acme"), login) as registry:
        elsewhere.location = f"http://127.0.0.1:{elsewhere.other}/upload"
        with pytest.raises(InvalidInput, match="does not accept blob"):
            registry.push(tmp_path / "image", tag="latest")
        assert elsewhere.received[-1] == ("PUT", f"127.0.0.1:{elsewhere.other}", "")
        assert elsewhere.received[-2][2].startswith("Basic ")

        elsewhere.location = "http://blobs.example/upload"
        with pytest.raises(InvalidInput, match=r"sent to blobs\.example without TLS"):
            registry.push(tmp_path / "image", tag="latest")
        elsewhere.challenge = 'Bearer realm="http://issuer.example/token",service="x"'
        with pytest.raises(Unauthenticated, match=r"sent to http://issuer\.example/token without"):
            registry.push(tmp_path / "image", tag="latest")
        elsewhere.challenge = "Negotiate"
        with pytest.raises(Unauthenticated, match="unknown authentication: 'Negotiate'"):
            registry.push(tmp_path / "image", tag="latest")


@pytest.mark.parametrize(
    "text",
    [
        "acme/images",
        "registry.example",
        "registry.example/UPPER",
        "registry.example/a/../b",
        "registry.example/a//b",
        "registry.example/a@sha256:0",
        "user@registry.example/a",
        "http://registry.example/a",
        "registry.example/a?b",
        "registry.example/" + "a" * 255,
        "registry.example/a\n",
    ],
)
def test_only_names_that_name_one_place_are_repositories(text: str) -> None:
    with pytest.raises(ValueError, match="is not a repository"):
        parse_repository(text)
