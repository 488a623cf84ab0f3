"""The dashboard: pages rendered on the server, without external resources. `routers` serve them;
their figures come from `controller.figures`."""

from pilotlight.controller.dashboard.pages.routes import routers

__all__ = ["routers"]
