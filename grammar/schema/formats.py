"""String formats: which are asserted, and exact patterns where an engine's own are too loose.

All other formats are annotations.
"""

# Calendar dates of RFC 3339, leap years included.
_DATE = (
    r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    r"|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
# Without leap seconds: whether one is legal depends on the offset.
_TIME = (r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?" r"(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])")
# At most 4 labels of at most 61 characters, so never over 253; no double hyphen, which is for IDNA.
_LABEL = r"[A-Za-z0-9](?:-?[A-Za-z0-9]){0,30}"

# Without quoted local parts and address literals; at most 63 characters, "@", and 185 more.
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,31}"

EXACT_PATTERNS = {
    "date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$",
    "hostname": rf"^{_LABEL}(?:\.{_LABEL}){{0,3}}$",
    "email": rf"^{_ATOM}(?:\.{_ATOM})?@{_LABEL}(?:\.{_LABEL}){{0,2}}$",
}
ENGINE_FORMATS = frozenset({"uuid", "ipv4", "ipv6", "uri", "duration"})
# No engine knows these; they are checked where the string ends. Since draft 2019-09 a format is an annotation by
# default, so they assert nothing in a document that names that draft or a later one.
CHECKED_FORMATS = frozenset(
    [
        *("regex", "iri", "iri-reference", "uri-reference", "uri-template", "json-pointer"),
        *("relative-json-pointer", "idn-email", "idn-hostname"),
    ]
)
ASSERTED_FORMATS = frozenset(EXACT_PATTERNS) | ENGINE_FORMATS | CHECKED_FORMATS
