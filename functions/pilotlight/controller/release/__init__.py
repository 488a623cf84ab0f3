"""Releases: traffic documents, aliases, app history, approvals, and the gates that a revision
passes before it takes traffic. Rollouts are in `rollouts`, deploys in `deployments`."""
