"""The eight kinds of document by name."""

from collections.abc import Callable
from random import Random

from .drafts import Draft, draft_contact, draft_event, draft_shipment, draft_support_ticket
from .sales import draft_invoice, draft_job_posting, draft_product, draft_review

KINDS: dict[str, Callable[[Random], Draft]] = {
    "contact": draft_contact,
    "invoice": draft_invoice,
    "event": draft_event,
    "job_posting": draft_job_posting,
    "support_ticket": draft_support_ticket,
    "product": draft_product,
    "shipment": draft_shipment,
    "review": draft_review,
}
NULLABLE = {"contact": ("phone",), "support_ticket": ("order_id",)}
