-- Decode JSON without raising: an error in the middle of a script would leave half a transition.

-- Decode a JSON text to a table, or return nil.
local function decode(text)
  if not text then return nil end
  local ok, record = pcall(cjson.decode, text)
  if ok and type(record) == 'table' then return record end
  return nil
end
