"""What the tenant wrote: loading it, its methods, arguments, results, examples, output, spans and
errors. Everything here runs only in the tenant's own process."""
