"""Heads of columns in a few languages: which name which field of a record, and which lines below are no item."""

from __future__ import annotations

import re

# Names of the same thing; a plural's s does not count.
MEANINGS = tuple(
    frozenset(names.split(","))
    for names in (
        "pos,position,po,no,nr,line,line no,line number,item no,row,lfd nr,n,num",
        "description,item,article,product,good,service,detail,name,bezeichnung,beschreibung,artikel,leistung,produkt,"
        "ware,désignation,libellé,produit,descripción,concepto,artículo,producto,descrizione,articolo,prodotto,"
        "omschrijving,descrição,produto,opis,nazwa",
        "quantity,qty,count,units,pcs,pieces,piece,menge,anzahl,stück,stückzahl,quantité,qté,cantidad,cant,quantità,qtà,"
        "aantal,hoeveelheid,quantidade,qtd,ilość",
        "price,unit price,price each,price per unit,rate,cost,unit cost,unit rate,each,preis,einzelpreis,stückpreis,"
        "e preis,ep,prix,prix unitaire,pu,precio,precio unitario,prezzo,prezzo unitario,prijs,stukprijs,preço,"
        "preço unitário,cena",
        "amount,total,line total,line amount,total price,total amount,net amount,sum,gesamt,gesamtpreis,betrag,summe,"
        "g preis,gp,montant,prix total,importe,importo,totale,bedrag,totaal,valor,wartość,kwota",
        "date,day,datum,tag,fecha,data",
        "name,full name,employee,person,nom,nombre,nome,naam",
    )
)
POSITIONS = MEANINGS[0]
CURRENCIES = re.compile(r"eur|usd|gbp|chf|jpy|cad|aud|sek|nok|dkk|pln|in")
TOTALS = re.compile(
    r"(?:sub)?totals?|sum|(?:zwischen|gesamt)?summe|(?:gesamt|netto|brutto|rechnungs)(?:betrag)?|net|gross|sous|somme|totale"
    r"|totaal|suma|vat|tax|gst|mwst|ust|tva|iva|btw|shipping|delivery|versand|discount|rabatt|balance|carried|brought"
    r"|übertrag|amount|due"
)
SURE_TOTALS = re.compile(r"(?:sub)?totals?|(?:zwischen|gesamt)?summe|gesamt|totale|totaal")


def rate_match(field: str, head: str) -> int:
    """Return how surely a head names a field: 3 for its own name, 2 for another name of it, 1 in part, 0 not."""
    own, its = _split(field), _split(head)
    if not own or not its:
        return 0
    if own == its:
        return 3
    meanings, its_meanings = _find_meanings(own), _find_meanings(its)
    if meanings & its_meanings:
        return 2
    is_part = set(own) <= set(its) or set(its) <= set(own)
    return int(is_part and not (meanings and its_meanings))


def is_position(head: str) -> bool:
    """Return whether a column has the numbers of the rows."""
    return " ".join(_split(head)) in POSITIONS or head.strip() == "#"


def is_total(label: str, has_gaps: bool) -> bool:
    """Return whether a row adds up others or is a tax, a charge or a discount, rather than an item.

    Args:
        has_gaps: whether cells of the row are empty.
    """
    words = re.findall(r"[^\W\d_]+", label.casefold())
    pattern = TOTALS if has_gaps else SURE_TOTALS
    return (has_gaps or len(words) == 1) and any(map(pattern.fullmatch, words[:1]))


def _split(name: str) -> tuple[str, ...]:
    """Return the words of a name in small letters, without currencies."""
    words = re.findall(r"[^\W\d_]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).casefold())
    return tuple(word for word in words if not CURRENCIES.fullmatch(word))


def _find_meanings(words: tuple[str, ...]) -> set[int]:
    whole = " ".join(words)
    singular = " ".join(word.removesuffix("s") for word in words)
    return {number for number, names in enumerate(MEANINGS) if whole in names or singular in names}
