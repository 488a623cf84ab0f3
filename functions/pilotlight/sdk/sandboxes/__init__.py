"""`Sandbox`: slots in which callers execute commands, with their processes and files."""
