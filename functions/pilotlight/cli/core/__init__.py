"""What every command uses: the session, common options and errors, formatting of output, parsing of
values. No commands."""
