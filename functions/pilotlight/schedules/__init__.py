"""When cron expressions are due, and what scaling schedules ask for at a time: pure functions for
the controller and the activators. The records are in `pilotlight.spec`."""
