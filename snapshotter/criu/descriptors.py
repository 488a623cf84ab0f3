"""Numbers of descriptors in a CRIU process: part of the contract with whoever starts it. Standard
library only."""

FIRST_FD = 20
"""Number of the first descriptor that is handed to CRIU; the socket is one below."""
SOCKET_FD = 19
