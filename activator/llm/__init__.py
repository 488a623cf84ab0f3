"""Language models: tokens where calls come in (`request_size` reads a request, `token_estimates`
knows how long its prompt is, `token_admission` lets it in, `token_reservation` counts until its
end), and what is known of their engines.

`engine_metrics` reads an engine's own metrics, `engine_state` makes of them what is known of an
instance, `engine_scraper` asks each now and then; `prefix_affinity` says which instance a prompt's
beginning belongs to, `engine_throttler` puts both to use."""
