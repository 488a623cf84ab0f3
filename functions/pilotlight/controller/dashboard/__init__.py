"""The dashboard: pages rendered here, nothing loaded from elsewhere. `router` serves them; figures come from `controller.figures`."""

from pilotlight.controller.dashboard.routes import router

__all__ = ["router"]
