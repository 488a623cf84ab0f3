"""Callers by a token of one of the operator's issuers (section `issuers` of platform.yaml), instead
of an API key.

`pilotlight.core.oidc` verifies tokens; here is what a token may call, and what strangers may cost.
"""
