"""What the benchmarks deploy. Each file is copied into a directory of its own first, so that its
bundle holds nothing else."""
