-- Walk through the users of an index in order: one look-up each, however much they have in it.
--
-- In such an index a user's members begin with the name, after what all of them begin with, and go
-- on with NUL. No name has a control character.

-- The first user at or behind a member, or nil.
local function user_from(key, lead, from)
  local last = string.byte(lead, -1)
  local bound = last and '(' .. string.sub(lead, 1, -2) .. string.char(last + 1) or '+'
  local member = redis.call('ZRANGEBYLEX', key, '[' .. lead .. from, bound, 'LIMIT', 0, 1)[1]
  return member and string.match(string.sub(member, #lead + 1), '^%Z*')
end

local function user_after(key, lead, user)
  return user_from(key, lead, user .. '\1')
end
