-- Read the clock once for the whole script.
--
-- ARGV now_ms  int  the time to act at, ms; empty: the server's clock

-- The time in whole ms, and the µs beyond it.
local function read_clock()
  if A.now_ms ~= '' then return tonumber(A.now_ms), 0 end
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000), t[2] % 1000
end

local now, now_us = read_clock()

-- A number as text. Commands accept numbers, but passing a number is three times slower than passing text.
local function text_of(number)
  if number == math.floor(number) and math.abs(number) < 1e15 then
    return string.format('%d', number)
  end
  return string.format('%.17g', number)
end

local now_text = text_of(now)
