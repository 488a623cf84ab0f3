"""A/B experiments: their design (`design`), life cycle (`lifecycle`), exposures and their analysis
(`evidence`, `report`), and guardrails that stop an arm (`guardrails`)."""
