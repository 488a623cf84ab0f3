"""What pushes and pulls of container images share: references, and logins to registries. No request
is made here."""
