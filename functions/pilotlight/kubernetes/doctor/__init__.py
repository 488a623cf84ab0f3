"""Looks at a cluster: is everything there that this platform needs, set as it needs it? Facts are
fetched once; every check is pure."""
