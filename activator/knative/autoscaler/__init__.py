"""Class `pilotlight.dev` (experimental): one of the activators decides how many pods each revision
has.

What activators say of themselves (`load_report`, `load_report_store`), what it comes to
(`load_aggregation`), the decision (`scaling`), what Knative is told of it (`podautoscalers`,
`conditions`, `serverless`), and who does it (`leader`)."""
