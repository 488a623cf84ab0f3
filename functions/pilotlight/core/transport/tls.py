"""The files of mutual TLS, with error messages that name the clock, file or authority at fault.

Dates are parsed with `cryptography`, which every process that uses TLS needs for its keys; the rest
is the standard library."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pilotlight.core.settings import PlatformSettings, SettingsInvalid

_EXPIRED, _NOT_YET = 10, 9
_UNKNOWN = frozenset({2, 18, 19, 20, 21})
_NAMES = frozenset({62, 63, 64})
"""Error numbers of X509_verify_cert (X509_STORE_CTX_get_error(3))."""


class CertificateInvalid(SettingsInvalid):
    """Raised when a certificate, key or authority of platform.tls_* is unusable; the message names
    it, the reason, and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files: our certificate (with its chain), its key, and the trusted authorities."""

    cert: Path
    key: Path
    ca: Path

    @classmethod
    def of(cls, settings: PlatformSettings) -> TlsFiles | None:
        """The files of platform.tls_*; None if they are not set."""
        if settings.tls_cert is None or settings.tls_key is None or settings.tls_ca is None:
            return None
        return cls(
            cert=Path(settings.tls_cert), key=Path(settings.tls_key), ca=Path(settings.tls_ca)
        )

    def state(self) -> tuple[tuple[int, int, int], ...]:
        """A value that changes when the files do, as on the renewal of a Secret. Zeros for missing
        files."""
        return tuple(_file_state(path) for path in (self.cert, self.key, self.ca))

    def check(self, now: datetime | None = None) -> None:
        """Raise CertificateInvalid unless the files match and are valid at `now` (None = this
        machine's clock)."""
        self._check_readable()
        _check_dates(self.cert, now or datetime.now(UTC))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            context.load_verify_locations(self.ca)
        except ssl.SSLError as e:
            raise CertificateInvalid(
                f"platform.tls_ca = {self.ca}: contains no PEM certificate ({_reason(e)})"
            ) from e
        try:
            context.load_cert_chain(self.cert, self.key, password=_no_password)
        except ssl.SSLError as e:
            if e.reason == "KEY_VALUES_MISMATCH":
                message = (
                    f"platform.tls_key = {self.key}: is not the key of the certificate "
                    f"{self.cert}: renew both together"
                )
                raise CertificateInvalid(message) from e
            raise CertificateInvalid(
                f"platform.tls_key = {self.key}: cannot be used with {self.cert} ({_reason(e)})"
            ) from e

    def _check_readable(self) -> None:
        for name, path in (("tls_cert", self.cert), ("tls_key", self.key), ("tls_ca", self.ca)):
            try:
                path.read_bytes()
            except OSError as e:
                hint = ": is the secret mounted?" if isinstance(e, FileNotFoundError) else ""
                raise CertificateInvalid(f"platform.{name} = {path}: {e.strerror}{hint}") from e


def _no_password() -> str:
    raise CertificateInvalid(
        "platform.tls_key: is encrypted, and there is no way to enter a password: store it "
        "unencrypted, readable only by the platform's user"
    )


def _file_state(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0)
    return (found.st_ino, found.st_mtime_ns, found.st_size)


def _check_dates(cert: Path, now: datetime) -> None:
    from cryptography import x509  # not loaded on nodes without TLS

    try:
        ours = x509.load_pem_x509_certificates(cert.read_bytes())[0]
    except (ValueError, IndexError) as e:
        raise CertificateInvalid(f"platform.tls_cert = {cert}: contains no PEM certificate") from e
    if now > ours.not_valid_after_utc:
        ended = f"expired {ours.not_valid_after_utc:%Y-%m-%d %H:%M:%S} UTC"
        raise CertificateInvalid(
            f"platform.tls_cert = {cert}: {ended}: renew it (with cert-manager: check its "
            f"Certificate's status)"
        )
    if now < ours.not_valid_before_utc:
        early = (ours.not_valid_before_utc - now).total_seconds()
        message = (
            f"is not valid for another {early:.0f} s (from "
            f"{ours.not_valid_before_utc:%Y-%m-%d %H:%M:%S} UTC)"
        )
        raise CertificateInvalid(
            f"platform.tls_cert = {cert}: {message}: is this machine's clock behind? Compare it "
            f"(chrony, NTP)"
        )


def find_tls_error(error: BaseException) -> ssl.SSLError | None:
    """The TLS error that caused `error`, if any."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ssl.SSLError):
            return seen
        seen = seen.__cause__ or seen.__context__
    return None


_ALERTS = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it sent no certificate",
    "CERTIFICATE_REQUIRED": "it requires a certificate and we sent none: set platform.tls_cert, "
    "tls_key and tls_ca",
    "UNKNOWN_CA": "it does not trust the authority of our certificate: platform.tls_ca differs "
    "between the two",
    "CERTIFICATE_EXPIRED": "our certificate has expired, or is not valid yet, by its clock: renew "
    "platform.tls_cert, and compare the clocks",
    "BAD_CERTIFICATE": "it rejects our certificate: compare the clocks, and platform.tls_ca of "
    "the two",
    "CERTIFICATE_UNKNOWN": "it rejects our certificate: compare the clocks, and platform.tls_ca "
    "of the two",
    "UNSUPPORTED_CERTIFICATE": "our certificate lacks a key usage: it needs the usages "
    "server auth and client auth",
    "PROTOCOL_VERSION": "it does not support TLS 1.3",
    "UNSUPPORTED_PROTOCOL": "it does not support TLS 1.3",
    "HTTP_REQUEST": "it uses plain HTTP instead of TLS",
    "WRONG_VERSION_NUMBER": "it does not use TLS on that port",
    # the same, as OpenSSL 3.5 names it
    "RECORD_LAYER_FAILURE": "it does not use TLS on that port",
}


def explain_tls_error(error: ssl.SSLError, name: str) -> str:
    """Explain why a handshake with `name` failed, and which side is at fault."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{name}: {_explain_verification_error(error)}"
    reason = error.reason or ""
    for part, text in _ALERTS.items():
        if reason.endswith(part):
            return f"{name}: {text}"
    return f"{name}: TLS failed ({_reason(error)})"


def _explain_verification_error(error: ssl.SSLCertVerificationError) -> str:
    number = error.verify_code
    if number == _EXPIRED:
        return "its certificate has expired: renew it there; or this machine's clock is ahead"
    if number == _NOT_YET:
        return (
            "its certificate is not valid yet: the two clocks differ (this machine's may be "
            "behind): compare them (chrony, NTP)"
        )
    if number in _UNKNOWN:
        return (
            "its certificate is from an authority that we do not trust: platform.tls_ca differs "
            "between the two"
        )
    if number in _NAMES:
        return (
            f"its certificate is for another name ({error.verify_message}): correct the "
            f"address, or add the name to the certificate"
        )
    return f"its certificate is rejected: {error.verify_message}"


def _reason(error: ssl.SSLError) -> str:
    return error.reason or str(error)
