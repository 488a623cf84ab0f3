-- POST of one body, and the summary as one line of JSON. Latencies in microseconds, as wrk has them.
wrk.method = "POST"
wrk.body = os.getenv("BENCH_BODY")

function done(summary, latency, requests)
  local e = summary.errors
  io.write(string.format(
    '{"requests":%d,"duration_us":%d,"p50_us":%d,"p99_us":%d,"bad":%d}\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99),
    e.connect + e.read + e.write + e.status + e.timeout))
end
