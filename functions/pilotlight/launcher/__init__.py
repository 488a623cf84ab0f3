"""A pod's entrypoint: gets code and weights from the node agent, has one worker serve, and lives as
long as it does.

Standard library only, and nothing of the platform but its door modules: it is there before anything
else of a cold start."""
