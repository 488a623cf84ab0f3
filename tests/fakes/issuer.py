"""An OpenID Connect issuer on loopback: discovery, keys that rotate, the authorization endpoint with
PKCE, the token endpoint with single-use codes, and the device flow. It signs what it is told, also
what no issuer would."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote_plus, urlencode

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from joserfc import jws
from joserfc.jwk import ECKey, Key, KeyParameters, OKPKey, RSAKey
from joserfc.jws import JWSRegistry

from tests.fakes.loopback import LoopbackServer, handler_for
from tests.fakes.user_code import Answer, Asked

CLIENT, SECRET = "pilotlight", "s3cret of the client: & %"
DEVICE_GRANT = "urn:ietf:params:oauth:grant-type:device_code"
ALICE = {"sub": "u-alice", "email": "alice@example.com", "email_verified": True, "groups": ["ml"]}
Claims = dict[str, Any]


def new_key(kid: str, algorithm: str = "ES256") -> Key:
    """A private key."""
    parameters: KeyParameters = {"kid": kid, "alg": algorithm, "use": "sig"}
    if algorithm.startswith(("RS", "PS")):
        return RSAKey.generate_key(2048, parameters)
    if algorithm == "EdDSA":
        return OKPKey.generate_key("Ed25519", parameters)
    return ECKey.generate_key("P-256", parameters)


def sign(key: Key, claims: Claims, **header: Any) -> str:
    """A token; `header` adds to its header, or replaces what is there."""
    algorithm = str(key.get("alg"))
    registry = JWSRegistry(algorithms=[algorithm], strict_check_header=False)
    head = {"typ": "JWT", "alg": algorithm, "kid": key.kid, **header}
    if algorithm == "EdDSA":  # the library warns of the name
        signed = f"{encoded(head)}.{encoded(claims)}"
        private = key.get_op_key("sign")
        assert isinstance(private, Ed25519PrivateKey)
        signature = private.sign(signed.encode())
        return f"{signed}.{_base64(signature)}"
    return jws.serialize_compact(head, json.dumps(claims), key, registry=registry)


def encoded(value: Any) -> str:
    """JSON in base64url."""
    return _base64(json.dumps(value).encode())


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


@dataclass
class Device:
    """A device that asked for a code."""

    code: str
    user_code: str
    state: str = "authorization_pending"
    polls: list[float] = field(default_factory=list)


class FakeIssuer:
    """Attributes:
    keys: published; the last one signs.
    requests: the paths that were asked for.
    person: the claims of who is signed in at its browser page; None = nobody agrees.
    change: changes the claims of ID tokens.
    is_dead: whether it drops connections.
    document: changes of the discovery document.
    answers: fixed answers by path, instead of its own.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """`clock`: seconds since the epoch, of its tokens."""
        self.clock = clock
        self.keys: list[Key] = [new_key("k1")]
        self.requests: list[str] = []
        self.person: Claims | None = dict(ALICE)
        self.change: Callable[[Claims], Claims] = dict
        self.is_dead = False
        self.document: Claims = {}
        self.answers: dict[str, Answer] = {}
        self.devices: dict[str, Device] = {}
        self.redirect_uris: set[str] = set()
        self.interval_s = 0
        self._codes: dict[str, Mapping[str, str]] = {}
        self.server = LoopbackServer(("127.0.0.1", 0), handler_for(self._answer))
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    @contextlib.contextmanager
    def serve(self) -> Iterator[FakeIssuer]:
        """Listen, until the context ends."""
        thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), name="issuer")
        thread.start()
        try:
            yield self
        finally:
            self.server.shutdown()
            self.server.server_close()
            thread.join()

    def rotate(self, kid: str, algorithm: str = "ES256") -> None:
        """Publish another key, and sign with it from now on."""
        self.keys.append(new_key(kid, algorithm))

    def withdraw(self, kid: str) -> None:
        """Publish a key no more."""
        self.keys = [key for key in self.keys if key.kid != kid]

    def claims(self, **changes: Any) -> Claims:
        """The claims of a token for calls. None removes one."""
        now = int(self.clock())
        claims = {
            "iss": self.url,
            "aud": "calls",
            "sub": "u-alice",
            "iat": now,
            "exp": now + 600,
            "groups": ["ml"],
            **changes,
        }
        return {name: value for name, value in claims.items() if value is not None}

    def token(self, **changes: Any) -> str:
        """A token for calls, signed with the newest key."""
        return sign(self.keys[-1], self.claims(**changes))

    def asked(self, path: str) -> int:
        """How often a path was asked for."""
        return self.requests.count(path)

    # -- endpoints -------------------------------------------------------------------------------
    def _answer(self, asked: Asked) -> Answer | None:
        self.requests.append(asked.path)
        if self.is_dead:
            return None
        if (fixed := self.answers.get(asked.path)) is not None:
            return fixed
        handlers = {
            "/.well-known/openid-configuration": self._discovery,
            "/keys": self._keys,
            "/authorize": self._authorize,
            "/token": self._token,
            "/device": self._device,
        }
        handler = handlers.get(asked.path)
        return handler(asked) if handler is not None else Answer(status=404)

    def _discovery(self, asked: Asked) -> Answer:
        return _json(
            {
                "issuer": self.url,
                "jwks_uri": f"{self.url}/keys",
                "authorization_endpoint": f"{self.url}/authorize",
                "token_endpoint": f"{self.url}/token",
                "device_authorization_endpoint": f"{self.url}/device",
                "authorization_response_iss_parameter_supported": True,
                "response_types_supported": ["code"],
                "subject_types_supported": ["public"],
                "id_token_signing_alg_values_supported": ["ES256"],
                **self.document,
            }
        )

    def _keys(self, asked: Asked) -> Answer:
        return _json({"keys": [key.as_dict(private=False) for key in self.keys]})

    def _authorize(self, asked: Asked) -> Answer:
        """The page at which a person agrees, who has signed in there before."""
        query = asked.query
        if query.get("client_id") != CLIENT or query.get("redirect_uri") not in self.redirect_uris:
            return Answer(status=400, body=b"unknown client, or address to come back to")
        back = {"state": query.get("state", ""), "iss": self.url}
        is_protected = query.get("code_challenge_method") == "S256" and query.get("code_challenge")
        if query.get("response_type") != "code" or not is_protected or "nonce" not in query:
            back["error"] = "invalid_request"
        elif self.person is None:
            back["error"] = "access_denied"
        else:
            code = secrets.token_urlsafe(16)
            self._codes[code] = query
            back["code"] = code
        return Answer(
            status=302, headers={"location": f"{query['redirect_uri']}?{urlencode(back)}"}
        )

    def _token(self, asked: Asked) -> Answer:
        form = {key: values[-1] for key, values in parse_qs(asked.body.decode()).items()}
        if not _is_client(asked.headers.get("authorization", "")):
            return _json({"error": "invalid_client"}, status=401)
        if form.get("grant_type") == DEVICE_GRANT:
            return self._device_token(form)
        query = self._codes.pop(form.get("code", ""), None)  # it works once
        verifier = form.get("code_verifier", "")
        challenge = _base64(hashlib.sha256(verifier.encode()).digest())
        if query is None or query["redirect_uri"] != form.get("redirect_uri"):
            return _json(
                {"error": "invalid_grant", "error_description": "no such code"}, status=400
            )
        if query["code_challenge"] != challenge:
            return _json({"error": "invalid_grant", "error_description": "PKCE"}, status=400)
        return self._tokens(nonce=query["nonce"])

    def _tokens(self, **claims: Any) -> Answer:
        whole = self.claims(**{"aud": CLIENT, "groups": None, **(self.person or {}), **claims})
        token = sign(self.keys[-1], self.change(whole))
        return _json({"token_type": "Bearer", "access_token": "a-1", "id_token": token})

    def _device(self, asked: Asked) -> Answer:
        if not _is_client(asked.headers.get("authorization", "")):
            return _json({"error": "invalid_client"}, status=401)
        device = Device(code=secrets.token_urlsafe(16), user_code=secrets.token_hex(4).upper())
        self.devices[device.code] = device
        return _json(
            {
                "device_code": device.code,
                "user_code": device.user_code,
                "verification_uri": f"{self.url}/activate",
                "verification_uri_complete": f"{self.url}/activate?user_code={device.user_code}",
                "expires_in": 600,
                "interval": self.interval_s,
            }
        )

    def _device_token(self, form: Mapping[str, str]) -> Answer:
        device = self.devices.get(form.get("device_code", ""))
        if device is None:
            return _json({"error": "expired_token"}, status=400)
        device.polls.append(time.monotonic())
        if device.state != "approved":
            return _json({"error": device.state}, status=400)
        del self.devices[device.code]
        return self._tokens()

    def decide(self, user_code: str, state: str = "approved") -> None:
        """What the person says who typed this code: `approved`, or an error of RFC 8628."""
        for device in self.devices.values():
            if device.user_code == user_code:
                device.state = state


def _is_client(authorization: str) -> bool:
    scheme, _, text = authorization.partition(" ")
    given = base64.b64decode(text).decode().split(":") if scheme == "Basic" else []
    return [unquote_plus(one) for one in given] == [CLIENT, SECRET]


def _json(value: Any, *, status: int = 200) -> Answer:
    return Answer(status=status, body=json.dumps(value).encode(), content_type="application/json")
