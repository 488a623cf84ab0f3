"""Open-loop load against any function: arrivals that do not wait for answers, and what came back,
as numbers and as a picture.

A generator that sends its next request when the last one is answered measures a queue that it keeps
short itself (coordinated omission: Tene, "How NOT to Measure Latency", 2013). Here arrivals are
drawn ahead, and a latency counts from the moment its request was due."""
