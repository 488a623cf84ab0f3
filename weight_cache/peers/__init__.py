"""Nodes give each other chunks that they have verified, so that a fleet reads each chunk from the
origin about once.

Who holds a whole file is known (every node is asked for its list every few seconds); who is to
fetch what nobody holds is agreed on chunk by chunk: the chunk's *owner*, which every node computes
alike (rendezvous hashing), notes who went to the origin for it, and sends everybody else there.
Nothing that a peer says is believed but its bytes, after they were hashed here. Every request
carries a ticket that only who has the platform's key can write. A peer that is slow, gone or wrong
costs one short deadline; then the next one is asked, or the origin."""
