"""Features of a model: the schema that training and serving share, and where online features
are read."""
