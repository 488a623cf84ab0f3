"""Commands for apps and their releases: deploy, revisions, rollouts, traffic, experiments, images,
weights."""
