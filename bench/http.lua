-- SPDX-License-Identifier: Apache-2.0
--
-- wrk -s http.lua ... URL: ends with a line of JSON.

function done(summary, latency, requests)
  local failed = 0
  for _, count in pairs(summary.errors) do
    failed = failed + count
  end
  print(string.format(
    '{"requests": %d, "failed": %d, "duration_us": %d, "p50_us": %d, "p99_us": %d}',
    summary.requests, failed, summary.duration, latency:percentile(50), latency:percentile(99)))
end
