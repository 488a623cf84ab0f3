"""OpenID Connect issuers that the operator trusts: their settings, their keys and tokens.

The controller signs people in with them, the activator verifies tokens of callers. What a token
grants is decided there."""
