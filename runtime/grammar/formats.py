"""Regexes of JSON Schema's string formats: what each allows is valid, though not all that is valid is allowed.

Dates are of the calendar (no 30 February, leap years as they fall), times have no leap second, and what RFCs leave
without a bound (fractions of a second, labels of a host name) is short.
"""

from __future__ import annotations

_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+\-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_LABEL = "[a-zA-Z0-9]{1,12}(?:-[a-zA-Z0-9]{1,12})?"  # no '--', as in the ASCII forms of other scripts
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL}){{0,6}}"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_ATOM = r"[a-zA-Z0-9!#$%&'*+\-/=?\^_`{|}\~]{1,30}"
_PCHAR = r"(?:[a-zA-Z0-9\-._\~!$&'()*+,;=:@]|%[0-9a-fA-F]{2})"
_PATHS = rf"(?://{_HOSTNAME}(?::[0-9]{{1,5}})?(?:/{_PCHAR}*)*|/?(?:{_PCHAR}+(?:/{_PCHAR}*)*)?)"
_URI = rf"[a-zA-Z][a-zA-Z0-9+\-.]{{0,15}}:{_PATHS}(?:\?(?:{_PCHAR}|[/?])*)?(?:\#(?:{_PCHAR}|[/?])*)?"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "hostname": _HOSTNAME,
    "email": rf"{_ATOM}(?:\.{_ATOM})?@{_HOSTNAME}",
    "uri": _URI,
    "ipv4": rf"{_OCTET}(?:\.{_OCTET}){{3}}",
    "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
}
"""Formats with a regex here. Those of `LIBRARY_FORMATS` are llguidance's own."""

LIBRARY_FORMATS = frozenset({"duration", "ipv6"})
