"""Dynamic batching in an instance: single calls of one method become one call of its body over
lists.

`release_policy`, `latency_model` and `adaptive_wait` decide, without a clock of their own;
`batch_key` says which calls may share a batch, `groups` holds them, `items` is what they get,
`runner` runs one; `batcher` is the only module that waits."""
