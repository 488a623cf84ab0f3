"""Further instances in promoted pods: forks of a pod's Template, made by its launcher."""
