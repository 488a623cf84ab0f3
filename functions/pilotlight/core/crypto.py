"""The platform's keys: one master key, and a separate key per purpose, derived with HKDF-SHA256
(RFC 5869).

| key | derived from | processes that have it | for |
|---|---|---|---|
| platform's key | created at the first start | controller, node agents of this machine | deriving the others |
| activator's key | the platform's | controller, activators | deriving the keys in the next three rows, and the token |
| `secrets` | the activator's | controller, activators | secrets of functions, opened at each instance start |
| `replies` | the activator's | controller, activators | responses that activators store in Redis: under idempotency keys, and those of response caches |
| `visitors` | the activator's | controller, activators | attributing a dashboard cookie's connections to an API key; does not authenticate |
| `sessions` | the platform's | controller | session cookies of the dashboard |
| `sign_ins` | the platform's | controller | cookies of sign-ins by an issuer that a browser has begun |
| `webhooks` | the platform's | controller | signing secrets of webhooks |
| `answers` | the platform's | controller | responses that the controller stores under idempotency keys |

A key file contains 32 random bytes in URL-safe base64. Sealing uses Fernet (AES-128-CBC and
HMAC-SHA256, from the `cryptography` package); sealed text begins with the id of the scheme, `k1.`."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from pilotlight.core.durability import write_durably
from pilotlight.core.settings import Paths, PlatformSettings, SettingsInvalid

SEALED_PREFIX = "k1."
"""Prefix of sealed text: Fernet, with a key derived for its purpose."""
ACTIVATOR_KEY_FILE = "activator.key"
_NODE_TOKEN_LABEL = b"pilotlight platform token"
_KEY_BYTES = 32


class DecryptionFailed(Exception):
    """Raised when sealed text was sealed with another key, or was modified."""


def derive_key(key: bytes, purpose: str) -> bytes:
    """Derive 32 bytes for `purpose`, which reveal nothing about `key` or other purposes."""
    return HKDF(
        algorithm=SHA256(), length=_KEY_BYTES, salt=None, info=f"pilotlight/v1/{purpose}".encode()
    ).derive(key)


class Sealer:
    """Seals and opens text for one purpose. Immutable."""

    def __init__(self, key: bytes, purpose: str) -> None:
        """`key`: the key from which the purpose's key is derived."""
        self._purpose = purpose
        self._fernet = Fernet(base64.urlsafe_b64encode(derive_key(key, purpose)))

    def __repr__(self) -> str:
        return f"<Sealer {self._purpose}>"

    def seal(self, text: str) -> str:
        """Encrypt and authenticate `text`."""
        return SEALED_PREFIX + self._fernet.encrypt(text.encode()).decode()

    def open(self, sealed: str) -> str:
        """Decrypt `sealed`. Raises DecryptionFailed."""
        try:
            if not sealed.startswith(SEALED_PREFIX):
                raise InvalidToken
            return self._fernet.decrypt(sealed.removeprefix(SEALED_PREFIX).encode()).decode()
        except InvalidToken as e:
            raise DecryptionFailed(
                f"sealed text cannot be opened with this platform's key for {self._purpose}: was "
                f"the key replaced?"
            ) from e


class ActivatorKey:
    """The key shared by activators and the controller. The platform's key cannot be derived from
    it. Immutable.

    Attributes:
        token: authenticates activators to the controller.
        secrets: seals secrets of functions.
        replies: seals responses that activators store for each other.
        visitors: seals the part of the dashboard's cookies that activators read
            (`pilotlight.core.dashboard.visitor_cookie`).
    """

    def __init__(self, raw: bytes) -> None:
        """Raises ValueError unless `raw` has 32 bytes."""
        if len(raw) != _KEY_BYTES:
            raise ValueError(f"{len(raw)} bytes, not {_KEY_BYTES}")
        self._raw = raw
        self.token = derive_key(raw, "token").hex()
        self.secrets = Sealer(raw, "secrets")
        self.replies = Sealer(raw, "replies")
        self.visitors = Sealer(raw, "visitors")

    @classmethod
    def load(cls, path: Path) -> ActivatorKey:
        """Read a key file. Raises OSError, ValueError."""
        return cls(base64.urlsafe_b64decode(path.read_bytes().strip()))

    def write(self, path: Path) -> None:
        """Write the key to `path` (0600), unless the file has this content already."""
        text = base64.urlsafe_b64encode(self._raw) + b"\n"
        if path.exists() and path.read_bytes() == text:
            return
        write_durably(path, text)


class PlatformKey:
    """The master key, held by the controller. Immutable.

    Attributes:
        activator: the activators' key, derived or configured separately.
        sessions: seals cookies of the dashboard.
        sign_ins: seals cookies of sign-ins that a browser has begun.
        webhooks: seals secrets of webhooks.
        answers: seals responses stored under idempotency keys.
        node_token: authenticates node agents with this key file to the controller.
    """

    def __init__(self, key: bytes, *, activator: ActivatorKey | None = None) -> None:
        """`activator`: a separate key of the activators (`platform.activator_key_file`); None =
        derived from this key."""
        self._key = key
        self._raw = base64.urlsafe_b64decode(key)
        self.activator = activator or ActivatorKey(derive_key(self._raw, "activator"))
        self.sessions = Sealer(self._raw, "sessions")
        self.sign_ins = Sealer(self._raw, "sign-ins")
        self.webhooks = Sealer(self._raw, "webhooks")
        self.answers = Sealer(self._raw, "answers")
        self.node_token = self.derived(_NODE_TOKEN_LABEL).hex()

    @property
    def token(self) -> str:
        """Authenticates activators to the controller."""
        return self.activator.token

    def with_activator(self, key: ActivatorKey) -> PlatformKey:
        """A copy with a separate key of the activators."""
        return PlatformKey(self._key, activator=key)

    @classmethod
    def load(cls, path: Path) -> PlatformKey:
        """Read the key file. Raises FileNotFoundError if the platform was never started here."""
        return cls(path.read_bytes().strip())

    @classmethod
    def load_or_create(cls, path: Path) -> PlatformKey:
        """Read the key file; create it if missing (0600, atomically)."""
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}.new")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as f:
                f.write(Fernet.generate_key() + b"\n")
                f.flush()
                os.fsync(f.fileno())
            try:
                os.link(fresh, path)  # fails if another process created it first: use that key
            except FileExistsError:
                pass
        finally:
            fresh.unlink()
        return cls.load(path)

    def derived(self, label: bytes) -> bytes:
        """Derive a key shared with node agents, which derive it too (HMAC-SHA256 of a label)."""
        return hmac.new(self._raw, label, hashlib.sha256).digest()


def load_platform_key(platform: PlatformSettings, paths: Paths) -> PlatformKey:
    """The key in <home>, created at the first start; or the key in `platform.key_file`, which
    several machines share and which is never created here.

    With `platform.activator_key_file`, activators use the key in that file. Raises
    SettingsInvalid."""
    if platform.key_file is None:
        key = PlatformKey.load_or_create(paths.home / "platform.key")
    else:
        key = read_platform_key("platform.key_file", platform.key_file)
    if platform.activator_key_file is None:
        return key
    return key.with_activator(_read_activator_key(Path(platform.activator_key_file)))


def load_activator_key(platform: PlatformSettings, paths: Paths) -> ActivatorKey:
    """The key in `platform.activator_key_file`, else in <home>/activator.key, which the controller
    writes. Raises SettingsInvalid."""
    if platform.activator_key_file is not None:
        return _read_activator_key(Path(platform.activator_key_file))
    return _read_activator_key(paths.home / ACTIVATOR_KEY_FILE)


def _read_activator_key(file: Path) -> ActivatorKey:
    try:
        return ActivatorKey.load(file)
    except OSError as e:
        hint = (
            "the controller of this machine writes it when it starts; elsewhere mount it and "
            "set platform.activator_key_file"
        )
        raise SettingsInvalid(f"{file}: activator key not readable ({e.strerror}): {hint}") from e
    except ValueError as e:
        raise SettingsInvalid(
            f"{file}: not an activator key: expected 32 bytes in URL-safe base64 ({e})"
        ) from e


def read_platform_key(setting: str, file: str) -> PlatformKey:
    """Read the mounted key file that `setting` names. Raises SettingsInvalid."""
    try:
        return PlatformKey.load(Path(file))
    except OSError as e:
        raise SettingsInvalid(f"{setting} = {file!r}: {e.strerror}: is the secret mounted?") from e
    except ValueError as e:
        raise SettingsInvalid(
            f"{setting} = {file!r}: not a key: expected 32 bytes in URL-safe base64"
        ) from e
