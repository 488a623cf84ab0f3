"""Authentication tokens: prove that a request comes from a node of this platform, with an HMAC
(RFC 2104) by a key that only these nodes have.

    Authorization: Pilotlight-Peer from=<node> to=<node> at=<ms since the epoch> nonce=<hex>
    mac=<hex>

The MAC covers method, target and all fields, so a token is valid for one request to one node. It is
valid once (nonces are remembered) and for a limited time. The first request to a node, which asks
for its id, is addressed to `-`."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
from collections import OrderedDict
from pathlib import Path

SCHEME = "Pilotlight-Peer"
ANY_NODE = "-"
TOKEN_LIFETIME_S = 60.0
"""Larger than the clock differences of a working cluster."""
_MAX_NONCES = 100_000
"""Limit of remembered nonces: about 15 MB. Above the rate that fills this within
`TOKEN_LIFETIME_S`, requests are refused."""
_LABEL = b"pilotlight weights between nodes"
_FIELDS = re.compile(
    r"from=([0-9a-f]{32}) to=([0-9a-f]{32}|-) at=(\d{1,15}) nonce=([0-9a-f]{32}) "
    r"mac=([0-9a-f]{64})\Z"
)


class TokenRejected(Exception):
    """Raised when a request is not authenticated; `reason` is one word for a metric."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class PeerKeyMissing(Exception):
    """Raised when the platform key is missing or invalid."""


class TokenSigner:
    """Creates tokens. Immutable."""

    def __init__(self, secret: bytes) -> None:
        self._key = hmac.new(secret, _LABEL, hashlib.sha256).digest()

    def __repr__(self) -> str:
        return "<TokenSigner>"

    @classmethod
    def load(cls, path: Path) -> TokenSigner:
        """Derive the key from the platform's key file (32 bytes in URL-safe base64). Raises
        PeerKeyMissing."""
        try:
            raw = base64.urlsafe_b64decode(path.read_bytes().strip())
        except (OSError, binascii.Error, ValueError) as e:
            raise PeerKeyMissing(
                f"{path} is not a valid platform key: {e}. Nodes authenticate with it: give each "
                f"node the same file"
            ) from e
        if len(raw) != 32:
            raise PeerKeyMissing(
                f"{path} is not a valid platform key: {len(raw)} bytes, not 32. Give each node the "
                f"platform's key file"
            )
        return cls(raw)

    def write(self, method: str, target: str, *, sender: str, receiver: str, now: float) -> str:
        """Create the Authorization header of a request; `now` in seconds since the epoch."""
        at, nonce = int(now * 1000), secrets.token_hex(16)
        mac = self.mac(method, target, sender, receiver, str(at), nonce)
        return f"{SCHEME} from={sender} to={receiver} at={at} nonce={nonce} mac={mac}"

    def mac(self, *fields: str) -> str:
        """The MAC of all fields; none may contain a line break."""
        return hmac.new(self._key, "\n".join(fields).encode(), hashlib.sha256).hexdigest()


class TokenVerifier:
    """Verifies tokens. Owner: one event loop."""

    def __init__(self, key: TokenSigner, *, own_id: str) -> None:
        self._key = key
        self._own_id = own_id
        self._seen: OrderedDict[str, float] = OrderedDict()

    def __repr__(self) -> str:
        return f"<TokenVerifier nonces={len(self._seen)}>"

    def admit(
        self, header: str | None, method: str, target: str, *, now: float, anybody: bool = False
    ) -> str:
        """Verify a token; return the id of the requesting node. `anybody`: the token may be
        addressed to `-`. Raises TokenRejected."""
        scheme, _, rest = (header or "").partition(" ")
        match = _FIELDS.match(rest) if scheme == SCHEME else None
        if match is None:
            raise TokenRejected("absent", "no token: only nodes of this platform are served")
        sender, receiver, at, nonce, mac = match.groups()
        if not hmac.compare_digest(mac, self._key.mac(method, target, sender, receiver, at, nonce)):
            raise TokenRejected("forged", "the token was not created with this platform's key")
        if receiver != self._own_id and not (anybody and receiver == ANY_NODE):
            raise TokenRejected("misaddressed", "the token is for another node")
        if abs(now - int(at) / 1000) > TOKEN_LIFETIME_S:
            raise TokenRejected(
                "stale",
                f"the token is {now - int(at) / 1000:.0f} s old: check the clocks of both nodes",
            )
        self._remember(nonce, now)
        return sender

    def _remember(self, nonce: str, now: float) -> None:
        while self._seen and next(iter(self._seen.values())) < now - 2 * TOKEN_LIFETIME_S:
            self._seen.popitem(last=False)
        if nonce in self._seen:
            raise TokenRejected("replayed", "the token was used before")
        if len(self._seen) >= _MAX_NONCES:
            raise TokenRejected("flooded", "too many requests to detect replayed tokens")
        self._seen[nonce] = now
