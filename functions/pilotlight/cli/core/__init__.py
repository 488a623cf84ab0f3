"""Code shared by all commands: the session, common options and errors, output formatting, value
parsing. It contains no commands."""
