-- SPDX-License-Identifier: Apache-2.0
--
-- wrk -s load.lua ... URL -- PAUSE_MS: asks for order after order, each once, with
-- a pause of 0 to 2 * PAUSE_MS before each on a connection. One in 301 is asked
-- for with its invoice.

local pause_ms
local order = 0

function init(arguments)
  pause_ms = tonumber(arguments[1])
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
