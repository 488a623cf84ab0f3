"""What functions keep outside of their instances: models, and files that they share."""
