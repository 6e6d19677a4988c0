"""Drafts of the kinds that name prices or opinions: invoice, job posting, product, review."""

import re
from datetime import date, timedelta
from random import Random

from . import goods, moments, values
from .drafts import Draft, Record, answer, list_slots, make_distractors, say
from .goods import Number, money, write_number
from .phrases import SLOT, capitalize, chance, compose, expand, join_bullets, join_list
from .tables import read_sections, words


def draft_invoice(rng: Random) -> Draft:
    unit = goods.currency(rng)
    lines = goods.invoice_lines(rng, unit)
    net = goods.as_number(sum(float(line["quantity"]) * float(line["unit_price"]) for line in lines))
    tax = goods.as_number(float(net) * rng.choice([0.05, 0.1, 0.19, 0.2])) if chance(rng, 0.35) else 0
    total = goods.as_number(float(net) + float(tax))
    iso, written = moments.calendar_date(rng)
    number = values.code(rng)
    if chance(rng, 0.5):
        number = rng.choice(["INV-", "INV", "F", "R-", "A-", "2025-", "No-", "B", "RE-"]) + values.digits(
            rng, rng.choice([3, 4, 5, 6])
        )
    record: Record = {
        "invoice_number": number,
        "vendor": values.company(rng),
        "date": iso,
        "currency": unit,
        "total": total,
    }
    slots = make_distractors(rng) | {
        "invoice_number": number,
        "vendor": record["vendor"],
        "date": written,
        "total": money(total, unit, rng),
        "net": write_number(net, rng, unit),
        "tax": write_number(tax, rng, unit),
        "customer": rng.choice([values.company, values.person])(rng),
        "due": moments.write_date(date.fromisoformat(iso) + timedelta(days=rng.choice([7, 14, 30])), rng),
    }
    return Draft("invoice", record | {"line_items": lines}, slots | write_invoice_lines(lines, unit, rng))


def write_invoice_lines(lines: list[dict[str, Number | str]], unit: str, rng: Random) -> dict[str, str]:
    """The invoice lines as running text, as rows, as a Markdown table and as CSV."""
    with_sign, sections, style = chance(rng, 0.55), read_sections("invoice"), rng.random()

    def write(template: str) -> list[str]:
        written = []
        for line in lines:
            # The same choices on every line: an invoice has one style.
            rng = Random(style)
            count, cost = int(line["quantity"]), float(line["unit_price"])
            price = goods.as_number(cost)
            text = {
                "item": str(line["description"]),
                "count": str(count),
                "count_word": values.count_word(rng, count),
                "unit": money(price, unit, rng) if with_sign else write_number(price, rng, unit),
                "sum": write_number(goods.as_number(count * cost), rng, unit),
            }
            written.append(expand(template, rng, text))
        return written

    inline = write(rng.choice(sections["inline"]))
    return {
        "lines": join_list(inline, rng),
        "rows": "\n".join(write(rng.choice(sections["rows"])))
        if chance(rng, 0.8)
        else join_bullets(inline, rng),
        "table": "\n".join(write("| <item> | <count> | <unit> |")),
        "csv": "\n".join(write("<item>;<count>;<unit>")),
    }


def draft_job_posting(rng: Random) -> Draft:
    unit, step = goods.currency(rng), rng.choice([1000, 1000, 500])
    low = rng.randrange(20, 160) * step * (1 if step == 1000 else 2)
    high = low + rng.randrange(3, 50) * 1000
    remote, skills = chance(rng, 0.5), values.unique(goods.skill, rng.choice([1, 2, 2, 3, 3, 3, 4, 5]), rng)
    position = values.job_title(rng)
    record: Record = {
        "position": position,
        "company": values.company(rng),
        "location": values.city(rng),
        "salary_min": low,
        "salary_max": high,
        "currency": unit,
        "remote": remote,
        "skills": skills,
    }
    written = {name: record[name] for name in ("position", "company", "location")}
    slots = make_distractors(rng) | written | list_slots("skills", skills, rng)
    slots["salary"] = write_salary(low, high, unit, rng)
    slots |= {"remote": answer("remote", remote, rng), "remote_answer": answer("remote_answer", remote, rng)}
    slots |= {"article": "an" if position[0] in "AEIOU" else "a", "date": moments.calendar_date(rng)[1]}
    return Draft("job_posting", record, slots)


def write_salary(low: int, high: int, unit: str, rng: Random) -> str:
    style = rng.random()
    if low % 1000 == 0 and style < 0.28:
        a, b = f"{low // 1000}{rng.choice(['k', 'k', 'K', ' k'])}", f"{high // 1000}k"
    else:
        mark = rng.choice([",", ",", ",", "", ".", " "] if unit != "CHF" else [",", "'", "'", ""])
        a, b = f"{low:,}".replace(",", mark), f"{high:,}".replace(",", mark)
    before, after = _currency_words(unit, rng)
    shapes = [
        "<s><a> - <s><b>",
        "<s><a> to <s><b>",
        "<s><a>-<b>",
        "<s><a>-<s><b>",
        "between <s><a> and <s><b>",
        "<s><a> – <b>",
    ]
    shapes += [
        "from <s><a> to <s><b>",
        "<a> - <b> <c>",
        "<c> <a> - <b>",
        "<a> to <b> <w>",
        "between <a> and <b> <w>",
        "<a>-<b> <w>",
    ]
    shapes += [
        "from <a> up to <b> <w>",
        "at least <a> and at most <b> <w>",
        "<s><a>–<s><b>",
        "<a>–<b> <c>",
        "<c> <a> to <b>",
        "min. <s><a>, max. <s><b>",
    ]
    text = expand(rng.choice(shapes), rng, {"a": a, "b": b, "s": before, "w": after, "c": unit})
    return text + expand("{|| per year| a year| p.a.| annually| gross| yearly|/year| per annum}", rng)


def _currency_words(unit: str, rng: Random) -> tuple[str, str]:
    before, after = goods.CURRENCIES[unit]
    return rng.choice(before), rng.choice(after)


def draft_product(rng: Random) -> Draft:
    unit, stocked = goods.currency(rng), chance(rng, 0.5)
    cost = goods.price(rng, 3, 2500, unit)
    features = values.unique(goods.feature, rng.choice([1, 2, 2, 3, 3, 4, 5]), rng)
    if chance(rng, 0.15):
        features = [capitalize(text) for text in features]
    name = goods.product(rng)
    record: Record = {
        "name": name,
        "price": cost,
        "currency": unit,
        "in_stock": stocked,
        "features": features,
    }
    stock = say("in_stock" if stocked else "out_of_stock", rng)
    slots = make_distractors(rng) | list_slots("features", features, rng)
    slots |= {
        "name": name,
        "price": money(cost, unit, rng),
        "stock": stock,
        "stock_answer": answer("stock_answer", stocked, rng),
    }
    if chance(rng, 0.4):
        slots["stock_answer"] = stock
    slots |= {
        "old_price": money(goods.as_number(float(cost) * 1.25), unit, rng),
        "saving": f"{rng.randrange(5, 60)}%",
    }
    return Draft("product", record, slots)


def draft_review(rng: Random) -> Draft:
    rating = rng.choice([1, 2, 3, 3, 4, 5, 1, 5])
    sentiment = "negative" if rating < 3 else "neutral" if rating == 3 else "positive"
    advised = rating > 3 if rating != 3 else chance(rng, 0.4)
    most = {1: [0, 0, 1, 1], 2: [1, 1, 2], 3: [1, 2, 2], 4: [1, 2, 2, 3], 5: [1, 2, 3, 3, 4]}
    pros = values.unique(goods.good_point, rng.choice(most[rating]), rng)
    cons = values.unique(goods.bad_point, rng.choice(most[6 - rating]), rng)
    record: Record = {
        "product": goods.product(rng),
        "rating": rating,
        "sentiment": sentiment,
        "pros": pros,
        "cons": cons,
        "would_recommend": advised,
    }
    slots = make_distractors(rng) | list_slots("pros", pros, rng) | list_slots("cons", cons, rng)
    slots |= {
        "product": record["product"],
        "rating_text": write_rating(rating, rng),
        "mood": say(f"mood_{sentiment}", rng),
        "verdict": say("recommend_yes" if advised else "recommend_no", rng),
        "verdict_answer": answer("recommend_answer", advised, rng),
        "praise": compose_known("praise", rng, slots) if pros else say("no_praise", rng),
        "complaint": compose_known("complaint", rng, slots) if cons else say("no_complaint", rng),
        "date": moments.calendar_date(rng)[1],
    }
    return Draft("review", record, slots)


def compose_known(section: str, rng: Random, slots: dict[str, str]) -> str:
    """A phrase of `facts.txt` whose slots are all known, with noise."""
    while True:
        phrase = rng.choice(read_sections("facts")[section])
        if all(name in slots for name in SLOT.findall(phrase)):
            return compose(phrase, rng, slots)


def write_rating(rating: int, rng: Random) -> str:
    word = words("number_words")[rating]
    shapes = [
        f"{rating}/5",
        f"{rating} out of 5",
        f"{rating} stars",
        f"{word} stars",
        "★" * rating + "☆" * (5 - rating),
    ]
    shapes += [
        f"{rating} of 5 stars",
        f"{word} out of five",
        "★" * rating,
        f"{rating} stars of 5",
        f"{word} of five stars",
    ]
    shapes += [
        f"{rating}.0/5",
        f"{rating} / 5",
        "*" * rating + f" ({rating}/5)",
        f"{rating}/5 stars",
        f"{capitalize(word)} stars",
    ]
    return re.sub(r"\b(1|[Oo]ne) stars", r"\1 star", rng.choice(shapes))
