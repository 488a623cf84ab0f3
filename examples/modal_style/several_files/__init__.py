"""An app in several files: `main` includes `text`."""
