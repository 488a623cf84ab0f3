"""Language models: token accounting of calls, and the state of their engines.

`request_size` measures a request, `token_estimates` estimates the length of its prompt,
`token_admission` admits it, `quotas.token_reservation` counts its tokens until the end.

`engine_metrics` parses an engine's own metrics, `engine_state` derives the state of an instance,
`engine_scraper` polls the engines; `prefix_affinity` maps the beginning of a prompt to an instance,
and `engine_throttler` uses both."""
