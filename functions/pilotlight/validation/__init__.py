"""Checks of JSON and JSON Schemas from tenants: validators, the number of values in a body, and the
cost of a validation. The data types are in `pilotlight.spec`."""
