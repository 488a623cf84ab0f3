"""Reads online features in an instance, for functions that declare some; others never import
it."""
