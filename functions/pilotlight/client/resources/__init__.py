"""Client methods for the control API, one module per resource. Calls, transport and the parsing of
responses are in `pilotlight.client`."""
