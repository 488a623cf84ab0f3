"""Checks of JSON and of JSON Schemas that tenants send: validators, the number of values in a body,
the cost of a check. It does not know what is checked: declarations are in `pilotlight.spec`."""
