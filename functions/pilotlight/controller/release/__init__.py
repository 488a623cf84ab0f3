"""Which revision answers: traffic documents, aliases, app history, approvals, and the gates that a
revision passes before it takes traffic. Step-by-step rollouts are in `rollouts`, deploying is in
`deployments`."""
