"""W3C trace context, and the layout of a trace's spans for display. The activator records and
exports spans."""
