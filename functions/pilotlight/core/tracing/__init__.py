"""W3C trace context, and the layout of a trace's spans for whoever draws it. Recording and
exporting spans is the activator's."""
