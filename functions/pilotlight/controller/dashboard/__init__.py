"""The dashboard: pages rendered here, nothing loaded from elsewhere. `routers` serve them; figures
come from `controller.figures`."""

from pilotlight.controller.dashboard.routes import routers

__all__ = ["routers"]
