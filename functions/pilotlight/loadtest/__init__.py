"""Open-loop load generator for functions and language models, with a numeric report and a chart.

A generator that waits for each response before it sends the next request keeps the queue short that
it measures (coordinated omission: Tene, "How NOT to Measure Latency", 2013). This one draws arrival
times in advance and measures latency from the time a request was due."""
