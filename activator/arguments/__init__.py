"""Arguments of calls: their validation, and their translation from and to other protocols, in a
process of its own where it may take long."""
