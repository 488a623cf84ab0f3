"""The OpenAI-compatible API: what may be asked of engines by the names that OpenAI's clients use,
and how their answers are read.

What comes is routed by its `model`, checked where that saves a start, and passed on with that
engine's own name for the model; the answer goes back as the engine gave it, but for what was asked
of it on our behalf (usage). Errors have OpenAI's shape here."""
