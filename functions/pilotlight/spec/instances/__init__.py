"""What a function says of its instances: how many there are, and which volumes they have."""
