"""Connections between the platform's processes, and to the public: where a process listens, mutual
TLS, and the HTTP clients made for it."""
