"""Commands on calls: make one, list them, schedule them, trace them, rate them, and many at once as
a load test."""
