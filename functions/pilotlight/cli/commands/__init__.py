"""The commands: one module for each noun, in folders by subject. `pilotlight.cli.main` imports a
module when one of its commands is used."""
