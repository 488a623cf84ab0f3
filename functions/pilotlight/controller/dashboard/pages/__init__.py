"""One module per page of the dashboard, with its router. What pages share (HTML, context,
formatting, charts) is in `dashboard`."""
