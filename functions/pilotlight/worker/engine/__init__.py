"""The worker of a function that is a stock inference server: it starts the server's process tree in
the slot, verifies its answers, and proxies bytes between the instance's socket and the server's. It
depends only on the server's command line, documented HTTP paths and processes, not on its
internals. Standard library and uvloop only."""
