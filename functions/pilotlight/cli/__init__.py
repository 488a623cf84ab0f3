"""The `pilotlight` command line: a thin layer over `pilotlight.client.client`, and over
`supervisor`, which starts the platform.

One module per noun. Modules import nothing heavy at module level, so that `pilotlight --help` stays
fast."""
