"""Taking snapshots of Templates, and proving each by a trial restore before it is used. What is
stored, selected and restored is `snapshots`."""
