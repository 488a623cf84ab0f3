"""The platform's own key: it seals secrets at rest and lets our processes know each other.

The key file holds 32 random bytes in URL-safe base64 (a Fernet key). Sealing is Fernet (AES-128-CBC and HMAC-SHA256, from
the `cryptography` package); the platform token is an HMAC of a fixed label, so that it reveals nothing of the key.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken

from weight_cache.settings import Paths, PlatformSettings, SettingsInvalid


class SealBroken(Exception):
    """Raised when a sealed text was not sealed with this platform's key, or was altered."""


class PlatformKey:
    """Seals, opens, and derives the platform token. Immutable."""

    def __init__(self, key: bytes) -> None:
        self._fernet = Fernet(key)
        self._raw = base64.urlsafe_b64decode(key)
        self.token = self.derived(b"pilotlight platform token").hex()

    def __repr__(self) -> str:
        return "<PlatformKey>"

    @classmethod
    def load(cls, path: Path) -> PlatformKey:
        """Read the key file. Raises FileNotFoundError when the platform was never started here."""
        return cls(path.read_bytes().strip())

    @classmethod
    def load_or_create(cls, path: Path) -> PlatformKey:
        """Read the key file, making it (0600, never half-written) when there is none."""
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}.new")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as f:
                f.write(Fernet.generate_key() + b"\n")
                f.flush()
                os.fsync(f.fileno())
            try:
                os.link(fresh, path)  # fails when another process was first: then theirs is the key
            except FileExistsError:
                pass
        finally:
            fresh.unlink()
        return cls.load(path)

    def derived(self, label: bytes) -> bytes:
        """A key of its own for one purpose; it tells nothing of this one."""
        return hmac.new(self._raw, label, hashlib.sha256).digest()

    def seal(self, text: str) -> str:
        """Encrypt and authenticate."""
        return self._fernet.encrypt(text.encode()).decode()

    def open(self, sealed: str) -> str:
        """Decrypt. Raises SealBroken."""
        try:
            return self._fernet.decrypt(sealed.encode()).decode()
        except InvalidToken as e:
            raise SealBroken("a sealed text does not open with this platform's key: was platform.key replaced?") from e


def key_of(platform: PlatformSettings, paths: Paths) -> PlatformKey:
    """The key in <home>, made at the first start; or the one of `platform.key_file`, which several machines share and nobody makes here.

    Raises SettingsInvalid.
    """
    if platform.key_file is None:
        return PlatformKey.load_or_create(paths.home / "platform.key")
    return key_in("platform.key_file", platform.key_file)


def key_in(setting: str, file: str) -> PlatformKey:
    """The key in a file that is mounted, which `setting` names. Raises SettingsInvalid."""
    try:
        return PlatformKey.load(Path(file))
    except OSError as e:
        raise SettingsInvalid(f"{setting} = {file!r}: {e.strerror}: is the secret mounted?") from e
    except ValueError as e:
        raise SettingsInvalid(f"{setting} = {file!r}: holds no key: 32 bytes in URL-safe base64") from e
