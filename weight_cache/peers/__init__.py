"""Exchange of verified chunks between nodes, so that a fleet reads each chunk from the origin about
once.

The holders of complete files are known: every node is asked for its list every few seconds. Missing
chunks are coordinated one by one: the chunk's *owner*, which every node computes alike (rendezvous
hashing), records which node fetches it from the origin and redirects all others to that node. Only
hash-verified bytes are trusted, no other statement of a peer. Every request carries a token that
only holders of the platform's key can create. A peer that is slow, unreachable or wrong costs one
short timeout; then the next peer or the origin is tried."""
