"""A Kubernetes API server for tests, over real HTTP: what the unmodified `kubernetes` client needs,
kept in memory.

`server.ApiServer` runs in the test's event loop, `thread.running_api_server()` in a thread of its
own, and `python -m tests.fakes.kubernetes --kubeconfig FILE` as a process. Faults are chosen with
`server.faults`, what clients asked is in `server.requests`."""
