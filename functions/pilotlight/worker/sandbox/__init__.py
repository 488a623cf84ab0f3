"""The worker of a sandbox: executes commands, and reads and writes files, for its caller."""
