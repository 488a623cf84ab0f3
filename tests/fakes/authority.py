"""A certificate authority of a test's own: certificates as cert-manager would write them, valid or
not, as the story wants."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pilotlight.core.transport.endpoint import TlsFiles

HOUR = timedelta(hours=1)


@dataclass
class Authority:
    """Signs what it is asked to. `name` only tells authorities apart."""

    name: str = "test authority"
    key: ec.EllipticCurvePrivateKey = field(
        default_factory=lambda: ec.generate_private_key(ec.SECP256R1())
    )

    def __post_init__(self) -> None:
        now = datetime.now(UTC)
        name = _name(self.name)
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(self.key.public_key())
        )
        builder = (
            builder.serial_number(x509.random_serial_number())
            .not_valid_before(now - HOUR)
            .not_valid_after(now + 24 * HOUR)
        )
        builder = builder.add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        builder = builder.add_extension(_KEY_USAGE, critical=True)
        builder = builder.add_extension(
            x509.SubjectKeyIdentifier.from_public_key(self.key.public_key()), critical=False
        )
        self.certificate = builder.sign(self.key, hashes.SHA256())

    def issue(
        self,
        directory: Path,
        *names: str,
        starts: timedelta = -HOUR,
        ends: timedelta = HOUR,
        ca: Authority | None = None,
    ) -> TlsFiles:
        """Write `tls.crt`, `tls.key`, `ca.crt` for `names` (DNS or IP), valid from `starts` to
        `ends` after now; `ca`: whom they trust."""
        directory.mkdir(parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(_name(names[0]))
            .issuer_name(self.certificate.subject)
            .public_key(key.public_key())
        )
        builder = (
            builder.serial_number(x509.random_serial_number())
            .not_valid_before(now + starts)
            .not_valid_after(now + ends)
        )
        builder = builder.add_extension(
            x509.SubjectAlternativeName([_general(name) for name in names]), critical=False
        )
        usages = x509.ExtendedKeyUsage(
            [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        )
        builder = builder.add_extension(usages, critical=False)
        ours = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        certificate = builder.add_extension(ours, critical=False).sign(self.key, hashes.SHA256())
        files = TlsFiles(
            cert=directory / "tls.crt", key=directory / "tls.key", ca=directory / "ca.crt"
        )
        plain = (
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        _replace(files.cert, certificate.public_bytes(serialization.Encoding.PEM))
        _replace(files.key, key.private_bytes(*plain))
        _replace(files.ca, (ca or self).certificate.public_bytes(serialization.Encoding.PEM))
        return files

    def nameless_context(self) -> ssl.SSLContext:
        """A client's that trusts this authority and has no certificate."""
        pem = self.certificate.public_bytes(serialization.Encoding.PEM).decode()
        return ssl.create_default_context(cadata=pem)


def settings_of(files: TlsFiles) -> str:
    """For section `platform` of a platform.yaml in flow style."""
    return f"tls_cert: {files.cert}, tls_key: {files.key}, tls_ca: {files.ca}"


_KEY_USAGE = x509.KeyUsage(
    digital_signature=True,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _replace(path: Path, content: bytes) -> None:
    # another file under the same name, as a mounted Secret changes
    fresh = path.with_suffix(".fresh")
    fresh.write_bytes(content)
    fresh.replace(path)
