"""Deployments: operations that change whole apps (deploy, promote, roll back, prune). They combine
`registry`, `release`, `rollouts`, `experiments` and `weights`, none of which imports this
package."""
