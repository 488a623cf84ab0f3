"""Replays: logged calls are made again on another revision, and the answers are compared. Where the
rows come from, the calls, and the report; the command is in `pilotlight.cli`."""
