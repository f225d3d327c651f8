-- SPDX-License-Identifier: Apache-2.0
--
-- wrk -s load.lua ... URL -- PAUSE_MS [FIRST]: asks for order after order, each once, beginning
-- with FIRST (1), with a pause of 0 to 2 * PAUSE_MS before each on a connection. One in 301 is
-- asked for with its invoice. The last line that it prints is JSON: how many were answered, and how
-- many were not.

local pause_ms
local order = 0

function init(arguments)
  pause_ms = tonumber(arguments[1])
  order = tonumber(arguments[2] or 1) - 1
end

function delay()
  return math.random(0, 2 * pause_ms)
end

function request()
  order = order + 1
  local path = "/orders/" .. order
  if order % 301 == 0 then
    path = path .. "/invoice"
  end
  return wrk.format("GET", path)
end

function done(summary)
  local lost = summary.errors.connect + summary.errors.read + summary.errors.write + summary.errors.timeout
  print(string.format('{"answered": %d, "lost": %d}', summary.requests, lost))
end
