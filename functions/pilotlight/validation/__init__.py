"""Checks of JSON and JSON Schemas from tenants: validators, the number of values in a body, the
cost of a validation, paths to values, and differences of two documents. The data types are in
`pilotlight.spec`."""
