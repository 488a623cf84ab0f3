"""The tenant's code: loading it, its methods, arguments, results, examples, output, spans and
errors. This package runs only in the tenant's own process."""
