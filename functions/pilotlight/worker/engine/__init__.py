"""The workers of functions that are servers: a stock inference server (an engine), or a web server
that user code starts. They start the server's process tree in the slot, verify its answers, and
proxy bytes between the instance's socket and the server's. They depend only on the server's command
line, HTTP paths and processes, not on its internals. Standard library and uvloop only."""
