"""Experiments: what one is (`design`), its life (`lifecycle`), who met it (`exposures`), what that
shows (`stats`, `report`), and what stops an arm by itself (`guard`)."""
