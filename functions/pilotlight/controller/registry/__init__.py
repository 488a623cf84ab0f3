"""What is known of deployed functions: references to apps, revisions, launch specs, images,
secrets, and what the change feed says of a function. How a revision gets traffic is in
`release`."""
