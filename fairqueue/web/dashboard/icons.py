"""The icons of the pages: strokes on a 24 by 24 grid, in the colour of the text."""

from markupsafe import Markup

# The content of each <svg>. A word beside each icon says the same.
SHAPES = {
    "overview": '<path d="M4 13h6V4H4zM14 20h6v-9h-6zM14 4v3h6V4zM4 20h6v-3H4z"/>',
    "schedules": '<circle cx="12" cy="12" r="8.5"/><path d="M12 7v5l3.5 2"/>',
    "users": (
        '<circle cx="9" cy="8" r="3.5"/><path d="M2.5 20a6.5 6.5 0 0 1 13 0"/>'
        '<path d="M16 4.8a3.5 3.5 0 0 1 0 6.4M18 14.3a6.5 6.5 0 0 1 3.5 5.7"/>'
    ),
    "tenants": '<path d="M4 20.5V8l8-4.5L20 8v12.5M2.5 20.5h19M9.5 20.5v-5h5v5"/>'
    '<path d="M8.5 11h.1M12 11h.1M15.5 11h.1"/>',
    "runs": '<path d="M9 6h11M9 12h11M9 18h11"/><path d="m3.5 5.5 2-1.2v3.4z"/>'
    '<path d="m3.5 11.5 2-1.2v3.4zM3.5 17.5l2-1.2v3.4z"/>',
    "failed": '<path d="M12 3.5 21.5 20h-19zM12 10v4.5M12 17.3v.2"/>',
    "workers": '<rect x="3.5" y="4" width="17" height="6.5" rx="1.5"/>'
    '<rect x="3.5" y="13.5" width="17" height="6.5" rx="1.5"/><path d="M7 7.2h.1M7 16.7h.1"/>',
    "partitions": '<path d="M3.5 4h7v7h-7zM13.5 4h7v7h-7zM3.5 14h7v6.5h-7zM13.5 14h7v6.5h-7z"/>',
    "audit": '<path d="M6 3.5h9l4 4V20.5H6z"/><path d="M14.5 3.5V8H19M9 12.5h7M9 16h7"/>',
    "settings": '<path d="M4 7h9M17 7h3M4 17h3M11 17h9"/>'
    '<circle cx="15" cy="7" r="2"/><circle cx="9" cy="17" r="2"/>',
    "search": '<circle cx="10.5" cy="10.5" r="6.5"/><path d="m15.5 15.5 5 5"/>',
    "sun": '<circle cx="12" cy="12" r="4"/><path d="M12 2.5V5M12 19v2.5M2.5 12H5M19 12h2.5'
    'M5.3 5.3 7 7M17 17l1.7 1.7M5.3 18.7 7 17M17 7l1.7-1.7"/>',
    "moon": '<path d="M20 14.5A8.5 8.5 0 0 1 9.5 4 8.5 8.5 0 1 0 20 14.5z"/>',
    "auto": '<circle cx="12" cy="12" r="8.5"/><path d="M12 3.5a8.5 8.5 0 0 1 0 17z" '
    'fill="currentColor"/>',
    "globe": '<circle cx="12" cy="12" r="8.5"/><path d="M3.5 12h17M12 3.5c5 5 5 12 0 17'
    'M12 3.5c-5 5-5 12 0 17"/>',
    "pause": '<path d="M8 5v14M16 5v14"/>',
    "play": '<path d="M7 4.5v15l12-7.5z"/>',
    "check": '<path d="m4.5 12.5 5 5 10-11"/>',
    "cross": '<path d="M6 6l12 12M18 6 6 18"/>',
    "clock": '<circle cx="12" cy="12" r="8.5"/><path d="M12 7v5l3.5 2"/>',
    "hourglass": '<path d="M6.5 3.5h11M6.5 20.5h11M7.5 3.5c0 5 4.5 5.5 4.5 8.5s-4.5 3.5-4.5 8.5'
    'M16.5 3.5c0 5-4.5 5.5-4.5 8.5s4.5 3.5 4.5 8.5"/>',
    "retry": '<path d="M20 5v5h-5M4 19v-5h5"/><path d="M19.2 10A7.5 7.5 0 0 0 6 6.8L4 9'
    'M4.8 14A7.5 7.5 0 0 0 18 17.2l2-2.2"/>',
    "skip": '<path d="m5 5 9 7-9 7zM18 5v14"/>',
    "ban": '<circle cx="12" cy="12" r="8.5"/><path d="m6 6 12 12"/>',
    "minus": '<path d="M5 12h14"/>',
    "plus": '<path d="M12 5v14M5 12h14"/>',
    "copy": '<rect x="8.5" y="8.5" width="12" height="12" rx="2"/>'
    '<path d="M15.5 8.5v-5h-12v12h5"/>',
    "logout": '<path d="M14 4H5v16h9M10 12h11M17.5 8.5 21 12l-3.5 3.5"/>',
    "menu": '<path d="M4 6.5h16M4 12h16M4 17.5h16"/>',
    "lock": '<rect x="5" y="10.5" width="14" height="10" rx="2"/>'
    '<path d="M8 10.5V7.5a4 4 0 0 1 8 0v3"/>',
    "key": '<circle cx="8" cy="14.5" r="4.5"/><path d="m11.5 11 8-8M16 6.5l3 3"/>',
    "terminal": '<path d="m4.5 6.5 6 5.5-6 5.5M12.5 18h7"/>',
    "inbox": '<path d="M3.5 13.5 6.5 5h11l3 8.5v6h-17z"/>'
    '<path d="M3.5 13.5H9l1.2 2.5h3.6l1.2-2.5h5.5"/>',
    "info": '<circle cx="12" cy="12" r="8.5"/><path d="M12 11v5.5M12 7.6v.2"/>',
    "next": '<path d="m9 5 7 7-7 7"/>',
    "first": '<path d="m18 5-7 7 7 7M6.5 5v14"/>',
    "trash": '<path d="M4 6.5h16M9 6.5v-3h6v3M6 6.5l1 14h10l1-14M10 10.5v6M14 10.5v6"/>',
    "edit": '<path d="M4 20l1-4.5L16.5 4 20 7.5 8.5 19z"/>',
    "live": '<circle cx="12" cy="12" r="2.5" fill="currentColor"/>'
    '<path d="M7 7a7 7 0 0 0 0 10M17 7a7 7 0 0 1 0 10M4.2 4.2a11 11 0 0 0 0 15.6'
    'M19.8 4.2a11 11 0 0 1 0 15.6"/>',
}


def icon(name: str) -> Markup:
    """The icon with this name. Raises KeyError if there is none."""
    return Markup(  # noqa: S704 - our own shapes
        '<svg class="icon" viewBox="0 0 24 24" width="18" height="18" fill="none" '
        'stroke="currentColor" stroke-width="1.7" stroke-linecap="round" stroke-linejoin="round" '
        f'aria-hidden="true" focusable="false">{SHAPES[name]}</svg>'
    )
