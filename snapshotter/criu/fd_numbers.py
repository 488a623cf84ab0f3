"""Descriptor numbers in a CRIU process: part of the contract with the code that starts it. Standard
library only."""

FIRST_FD = 20
"""Number of the first descriptor passed to CRIU; the socket is one below."""
SOCKET_FD = 19
