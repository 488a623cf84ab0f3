"""What a handle is bound to: arguments of a class, and options of its own. Declarations and handles
are in `pilotlight.sdk`."""
