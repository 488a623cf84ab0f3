"""A/B experiments: their design (`design`), life cycle (`lifecycle`), exposures and their analysis
(`evidence`, `stats`, `report`), and guardrails that stop an arm (`guardrails`)."""
