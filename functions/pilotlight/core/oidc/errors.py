"""Errors of issuers and their tokens."""

from __future__ import annotations


class OidcError(Exception):
    """Base of these errors."""


class TokenRefused(OidcError):
    """Raised when a token is not valid; the message says why, and contains nothing of it."""


class IssuerUnreachable(OidcError):
    """Raised when an issuer does not answer, or not with what the specification requires."""


class GrantRefused(OidcError):
    """Raised when an issuer refuses a request for a token. `code`: its error code (RFC 6749,
    section 5.2; RFC 8628, section 3.5)."""

    def __init__(self, code: str, description: str) -> None:
        super().__init__(f"{code}: {description}" if description else code)
        self.code = code
