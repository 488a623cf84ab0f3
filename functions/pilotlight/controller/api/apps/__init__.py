"""Routes about apps and functions: deploying, revisions, traffic, rollouts, experiments,
objectives, schedules, instances."""
