"""Drills: something fails on purpose on a running platform, while a function of the user's is
called. What fails (`faults`, `neighbours`), the calls meanwhile (`runner`), and the verdict
(`verdict`); the command is in `pilotlight.cli`."""
