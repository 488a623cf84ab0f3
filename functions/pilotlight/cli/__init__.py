"""The command line: what people type. Thin: it speaks to the platform through
`pilotlight.client.client`, and starts it through `supervisor`.

One module per noun. Nothing heavy is imported at module level, so that `pilotlight --help` stays
quick."""
