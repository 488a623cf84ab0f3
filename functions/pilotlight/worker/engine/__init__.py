"""The worker of a function that is a stock inference server: it starts the server's process tree in
the slot, proves that it answers, and hands bytes through between the instance's socket and the
server's own. Nothing here knows the server's inside: its command line, its documented HTTP paths
and its processes are all that is used. Standard library and uvloop only."""
