"""Pages of the section Functions: apps, their functions and releases, experiments, objectives,
drift, and models."""
