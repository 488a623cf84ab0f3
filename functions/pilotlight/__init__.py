"""pilotlight: serverless functions for models, back from zero in milliseconds."""
