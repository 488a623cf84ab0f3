"""The control API as typed methods, one module for each resource. Calls, transport and the parsing
of responses are in `pilotlight.client`."""
