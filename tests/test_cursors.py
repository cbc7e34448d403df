"""Cursors go round, and nothing else is taken for one."""

import pytest

from fairqueue.cursors import decode_cursor, encode_cursor
from fairqueue.errors import InvalidInput, InvalidSchedule


@pytest.mark.parametrize("place", [b"", b"alice\0nightly", bytes(range(256))])
def test_a_cursor_gives_its_place_back(place: bytes) -> None:
    assert decode_cursor(encode_cursor(place)) == place


@pytest.mark.parametrize("cursor", [None, 7, b"YQ==", "a", "no cursor", "ü", "\ud800", "YQ==\n"])
def test_what_is_not_a_cursor_is_refused(cursor: object) -> None:
    with pytest.raises(InvalidInput, match="is not valid: pass the `cursor` of a page"):
        decode_cursor(cursor)
    with pytest.raises(InvalidSchedule):
        decode_cursor(cursor, InvalidSchedule)
