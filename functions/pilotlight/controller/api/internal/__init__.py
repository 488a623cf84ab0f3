"""Routes of the platform's own processes (activators, node agents); the platform token opens
them."""
