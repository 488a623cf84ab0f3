"""The dashboard: pages rendered on the server, without external resources. `routers` serve them;
their figures come from `controller.analytics`."""

from pilotlight.controller.dashboard.pages.routes import routers

__all__ = ["routers"]
