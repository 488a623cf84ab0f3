"""Autoscaler class `pilotlight.dev`: one of the activators decides how many pods each revision has.

`load_report` and `load_report_store` are the reports of activators, `load_aggregation` their sum,
`scaling` the decision, `podautoscalers`, `conditions` and `serverless` the objects exchanged with
Knative, and `leader` runs it."""
