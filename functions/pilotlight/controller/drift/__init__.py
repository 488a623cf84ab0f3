"""Drift and quality of functions with `monitor=`: what is counted of their prediction logs
(`sketch_store`), comparison with a reference (`report`), predictions against feedback (`labels`),
and the loop that judges each window once (`loop`).

Only counts, predictions and values of slices arrive here; the payloads of calls do not."""
