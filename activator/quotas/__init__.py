"""Quotas of incoming calls: which ones apply, whether a call is admitted, and where usage is
counted.

`rules` selects the quotas that apply, `token_bucket` decides, a store (`process_store`,
`redis_store`) counts, `admission` is what a call holds, `token_reservation` the tokens of a
language model's call. `unauthenticated_limit` limits requests without a key."""
