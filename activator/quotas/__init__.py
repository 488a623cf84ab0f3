"""Quotas where calls come in: what applies to a call, whether it may go on, and where that is
counted.

`rules` says what applies, `decision` decides, a store (`process`, `redis_store`) keeps the count,
`admission` is what a call holds."""
