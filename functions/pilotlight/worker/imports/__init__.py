"""Imports of a worker: which packages of the image user code imports and in which order, and the
worker that imports them ahead of any user code (an environment snapshot). Standard library and the
worker runtime only."""
