-- Walk through the users of an index in order, with one look-up for each.
--
-- The members of a user begin with a prefix that all members have, the user and NUL. Names of users have no
-- control characters.

-- The first user at or after a member, or nil.
local function user_from(key, lead, from)
  local last = string.byte(lead, -1)
  local bound = last and '(' .. string.sub(lead, 1, -2) .. string.char(last + 1) or '+'
  local member = redis.call('ZRANGEBYLEX', key, '[' .. lead .. from, bound, 'LIMIT', 0, 1)[1]
  return member and string.match(string.sub(member, #lead + 1), '^%Z*')
end

local function user_after(key, lead, user)
  return user_from(key, lead, user .. '\1')
end
