"""Patterns for strings that the schema declares as a date or a time of day.

The schema declares one by `format: date`, or by a description that is a form (`HH:MM`) or ends with one
(`Start, 24 hour HH:MM`). A description that allows something else (`YYYY-MM-DD, or "on receipt"`) does not count.
"""

from __future__ import annotations

import re
from functools import cached_property

from app.extraction.prompt import Schema

_DAY_OF_YEAR = "(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
DATE_PATTERN = f"^(19|20)[0-9]{{2}}-{_DAY_OF_YEAR}$"
ANY_DATE_PATTERN = f"^[0-9]{{4}}-{_DAY_OF_YEAR}$"
TIME_PATTERN = "^([01][0-9]|2[0-3]):[0-5][0-9]$"
ANY_TIME_PATTERN = "^[0-9]{2}:[0-5][0-9]$"
# Descriptions of the patterns for users.
MEANINGS = {
    DATE_PATTERN: "YYYY-MM-DD from 1900 to 2099",
    ANY_DATE_PATTERN: "YYYY-MM-DD",
    TIME_PATTERN: "HH:MM from 00:00 to 23:59",
    ANY_TIME_PATTERN: "HH:MM",
}
# The exception, for a person who is not shown a text.
OTHER_TIMES = "Years before 1900 and after 2099 and hours after 23 are taken where the text has such ones."

_CLOCK = r"\(?24[- ]?(?i:h(?:ours?|rs?)?)\)?"
_DESCRIBED = re.compile(
    r"(?:(?P<lead>.+?)(?:[,;:(]|\s[-–—]|\b(?i:as|in)\b)\s*)?"
    rf"(?:(?:(?i:format)|ISO(?: 8601)?|{_CLOCK}),?\s*)*"
    rf"(?P<form>YYYY-MM-DD|HH:MM)(?:,?\s*(?:(?i:format)|{_CLOCK}))?[).\s]*"
)
# Words before the form that make it optional, only a part of the text, or a duration.
_OPEN = re.compile(
    r"(?<!\w)['\"‘“]|YY|HH|MM"
    r"|(?i:\b(?:or|unless|otherwise|else|if|unknown|empty|times|dates|hours|range|period|between|duration|length|elapsed"
    r"|(?<=\w )when|blank|n/a|none|null|missing|absent|total|sum|spent|worked|overtime)\b)"
)
_HOURS_OF_CLOCK = re.compile(_CLOCK)

# Any number of four digits may be a year; one that is none loosens a pattern and forbids nothing.
_OTHER_YEAR = re.compile(
    r"(?<![\w,'+#])(?<!\d\.)(?:1[0-8]\d\d|21\d\d)(?![\w%]|[.,']\d)"
    r"|\d[./-](?:0\d{3}|1[0-8]\d\d|2[1-9]\d\d|[3-9]\d{3})(?!\d)"
    r"|(?<!\d)(?:0\d{3}|1[0-8]\d\d|2[1-9]\d\d|[3-9]\d{3})(?:[./-]\d{1,2}[./-]\d{1,2}(?!\d)|\s?年)"
)
_OTHER_HOUR = re.compile(
    r"(?:2[4-9]|[3-9]\d)(?::|\s?h\s?)[0-5]\d(?![\d:])(?<![\d:.,]\d\d:\d\d)(?<![\d:.,]\d\dh\d\d)"
)
# A longer description says more than a form.
_MAX_DESCRIPTION = 1000


class Forms:
    """The patterns of dates and times of day in what is extracted from one text.

    Years before 1900 and after 2099 and hours after 23 are open where the text has such ones.
    """

    def __init__(self, text: str) -> None:
        self.text = text

    def find_pattern(self, subschema: Schema) -> str | None:
        """The pattern of a date or a time of day; None where the schema asks for neither."""
        if subschema.get("format") == "date":
            # The format alone holds the form.
            return None if self.has_other_years else DATE_PATTERN
        description = subschema.get("description")
        if "format" in subschema or not isinstance(description, str):
            return None
        form = find_form(description)
        if form == "YYYY-MM-DD":
            return ANY_DATE_PATTERN if self.has_other_years else DATE_PATTERN
        if form == "HH:MM":
            return ANY_TIME_PATTERN if self.has_other_hours else TIME_PATTERN
        return None

    @cached_property
    def has_other_years(self) -> bool:
        """Whether the text has a year before 1900 or after 2099."""
        return has_other_years(self.text)

    @cached_property
    def has_other_hours(self) -> bool:
        """Whether the text has an hour after 23."""
        return _OTHER_HOUR.search(self.text) is not None


def find_form(description: str) -> str | None:
    """The one form that a description asks for, YYYY-MM-DD or HH:MM."""
    match = _DESCRIBED.fullmatch(description.strip()) if len(description) <= _MAX_DESCRIPTION else None
    if match is None or _OPEN.search(_HOURS_OF_CLOCK.sub("", match["lead"] or "")):
        return None
    return match["form"]


def has_other_years(text: str) -> bool:
    """Whether the text has what may be a year before 1900 or after 2099."""
    return _OTHER_YEAR.search(text) is not None
