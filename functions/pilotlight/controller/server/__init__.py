"""The process and its HTTP frame: database lock, standby, user, metrics, health, threads, error
responses, idempotency, the node backend. Routes live in `api`, pages in `dashboard`; `http_app` and
`process` put all of it together."""
