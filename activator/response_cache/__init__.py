"""Response cache: equal calls of one tenant are answered without running them again, for functions
that ask for it. Contains what happens to such a call, its key, and the answers in Redis."""
