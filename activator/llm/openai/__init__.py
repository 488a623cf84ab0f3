"""The OpenAI-compatible API: requests in the format of OpenAI's clients, and parsing of engines'
answers.

A request is routed by its `model`, validated where that saves a start, and forwarded with the
engine's own name for the model. The answer is returned as the engine sent it, without the parts
that were requested for accounting only (usage). Errors have OpenAI's format."""
