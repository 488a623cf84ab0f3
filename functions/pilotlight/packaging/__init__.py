"""Packaging of apps for upload: source archives, pickled functions, weights, and the specs that
refer to them by digest."""
