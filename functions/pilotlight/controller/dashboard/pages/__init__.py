"""The dashboard's pages, one module per page with its router, in a folder for each section with
several. What pages share (HTML, context, formatting, charts) is in `dashboard`."""
