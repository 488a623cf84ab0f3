"""Deploying, promoting, rolling back and pruning: the operations that change apps as a whole. They
combine `registry`, `release`, `rollouts`, `experiments` and `weights`; no folder below imports
them."""
