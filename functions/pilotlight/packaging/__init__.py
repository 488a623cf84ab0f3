"""From declarations to what is uploaded: source archives, pickled functions, weights, and the specs
that name them by digest."""
