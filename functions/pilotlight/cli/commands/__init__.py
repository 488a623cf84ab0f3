"""The commands, one module for each noun, in folders by who uses them; `pilotlight.cli.main`
imports a module when one of its commands is named."""
