"""Dynamic batching in an instance: single calls of one method become one call of its body over
lists.

`release_policy`, `latency_model` and `adaptive_wait` decide when a batch runs, without a clock of
their own; `batch_key` determines which calls may share a batch, `groups` holds waiting calls,
`items` defines the calls of a batch and their results, `runner` runs a batch; `batcher` is the only
module that waits."""
