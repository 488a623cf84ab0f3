"""The local platform: its configuration, its processes, their supervision and their logs. The
commands that start and stop it are in `pilotlight.cli.commands.operations`."""
