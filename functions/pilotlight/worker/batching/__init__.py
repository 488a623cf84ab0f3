"""Dynamic batching in an instance: single calls of one method become one call of its body over
lists.

`rules`, `cost` and `patience` decide, without a clock of their own; `kinds` says which calls may
share a batch, `groups` holds them, `members` is what they get, `body` runs one; `gathering` is the
only module that waits."""
