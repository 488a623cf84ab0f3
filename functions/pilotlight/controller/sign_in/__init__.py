"""Sign-in of people by the operator's issuers (section `issuers` of platform.yaml), to the
dashboard and from the command line.

A person's rights are those of an API key that is made for the sign-in and ends with it."""
