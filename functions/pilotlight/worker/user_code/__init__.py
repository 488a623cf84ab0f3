"""What the tenant wrote: loading it, its methods and hooks, its arguments, examples, spans and
errors. Everything here runs only in the tenant's own process."""
