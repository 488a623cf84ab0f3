"""Capacity planning: how many instances a function needs for a rate and a 99th percentile, from the
measured times of its calls and starts. What was measured, the model of an instance, formulas, a
simulation, and the plan; the command is in `pilotlight.cli`."""
