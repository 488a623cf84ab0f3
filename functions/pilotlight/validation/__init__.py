"""Checks of JSON and JSON Schemas from tenants: validators, the number of values in a body, the
cost of a validation, and paths to values. The data types are in `pilotlight.spec`."""
