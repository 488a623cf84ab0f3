"""The HTTP API: one router per resource. Routers make no decisions and contain little SQL."""
