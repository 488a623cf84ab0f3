"""`python -m pilotlight` is the `pilotlight` command."""

from pilotlight.cli.main import main

if __name__ == "__main__":
    main()
