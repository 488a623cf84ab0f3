"""Statistics of finished calls: counted on the hot path, sent to the controller each second
(`pilotlight.spec.observations`)."""
