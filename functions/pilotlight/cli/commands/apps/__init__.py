"""Commands on apps and what they are released with: deploy, revisions, rollouts, traffic,
experiments, images, weights."""
