"""Memory that a lazily restored process still misses: the server that brings it, and what it reads
and writes. Standard library only."""
