"""What finished calls looked like: counted on the hot path, posted to the controller each second
(`pilotlight.observations`)."""
