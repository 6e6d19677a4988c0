"""Dates and times: the ISO form and the many ways to write them."""

from datetime import date, timedelta
from random import Random

from .phrases import chance, fill_slots
from .tables import read_sections, words


def calendar_date(rng: Random) -> tuple[str, str]:
    """A date as ISO text and as a document writes it."""
    day = date(2019, 1, 1) + timedelta(days=rng.randrange(365 * 10))
    if chance(rng, 0.5):
        day = date(2025, 1, 1) + timedelta(days=rng.randrange(365 * 3))
    return day.isoformat(), write_date(day, rng)


def write_date(day: date, rng: Random) -> str:
    """The day in a random style."""
    y, m, d = day.year, day.month, day.day
    month, weekday = words("months")[m - 1], words("weekdays")[day.weekday()]
    slots = {
        "iso": day.isoformat(),
        "y": y,
        "m": m,
        "d": d,
        "mm": f"{m:02d}",
        "dd": f"{d:02d}",
        "month": month,
        "short": month[:3],
        "weekday": weekday,
        "brief": weekday[:3],
        "th": "th" if 10 < d < 20 else {1: "st", 2: "nd", 3: "rd"}.get(d % 10, "th"),
        "american": f"{m:02d}/{d:02d}/{y}" if d > 12 else f"{d}. {month} {y}",
    }
    section = "common_dates" if chance(rng, 0.4) else "dates"
    return fill_slots(rng.choice(read_sections("moments")[section]), slots)


def clock_time(rng: Random) -> tuple[str, str]:
    """A time as HH:MM and as a document writes it."""
    hour = rng.randrange(7, 22) if chance(rng, 0.9) else rng.randrange(24)
    minute = rng.choice([0, 0, 0, 15, 30, 30, 45, 5, 10, 20, 40, 50, rng.randrange(60)])
    return f"{hour:02d}:{minute:02d}", write_time(hour, minute, rng)


def write_time(hour: int, minute: int, rng: Random) -> str:
    """The time in a random style; words for the time of day only where they are clear."""
    twelve, half = hour % 12 or 12, "am" if hour < 12 else "pm"
    slots = {
        "h": hour,
        "hh": f"{hour:02d}",
        "mm": f"{minute:02d}",
        "twelve": twelve,
        "half": half,
        "half_upper": half.upper(),
        "half_dots": f"{half[0]}.m.",
        "part": "morning" if hour < 12 else "afternoon" if hour < 18 else "evening",
        "spoken": words("number_words")[twelve],
    }
    sections = read_sections("moments")
    styles = list(sections["times"])
    if minute == 0:
        styles += sections["full_hours"]
        styles += sections["day_hours"] if 5 < hour < 22 else ()
    if minute == 30 and 6 < hour < 22:
        styles.append("half past <spoken> in the <part>")
    if (hour, minute) == (12, 0):
        styles += ["noon"] * 6
    return fill_slots(rng.choice(styles), slots)
