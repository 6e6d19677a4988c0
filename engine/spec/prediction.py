"""PredictionProposer: follows the text that the request itself predicts (OpenAI's `prediction`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.request import Request
from engine.spec.ngram import NgramIndex

# After a difference, so many equal tokens are needed to find the place in the prediction again.
WIDTH = 3


@dataclass(slots=True)
class _Reading:
    """How far the output has followed the prediction."""

    index: NgramIndex
    num_read: int = 0  # output tokens compared so far
    place: int = 0  # the output continues here, if `is_found`
    is_found: bool = True


class PredictionProposer:
    """Proposes the rest of the prediction, from the place that the output has reached."""

    name = "prediction"

    def __init__(self) -> None:
        self._readings: dict[int, _Reading] = {}  # by handle

    def propose(self, request: Request, limit: int) -> Sequence[int]:
        if not request.prediction:
            return ()
        reading = self._readings.get(request.handle)
        if reading is None:
            reading = self._readings[request.handle] = _Reading(NgramIndex(request.prediction, WIDTH))
        self._read(reading, request)
        if not reading.is_found:
            return ()
        return request.prediction[reading.place : reading.place + limit]

    def forget(self, request: Request) -> None:
        self._readings.pop(request.handle, None)

    def _read(self, reading: _Reading, request: Request) -> None:
        """Compare the new output tokens with the prediction."""
        prediction, start = request.prediction, request.num_prompt_tokens
        for position in range(start + reading.num_read, request.num_tokens):
            token_id = request.token_ids[position]
            if reading.is_found and reading.place < len(prediction) and prediction[reading.place] == token_id:
                reading.place += 1
            else:
                reading.is_found = False
        reading.num_read = request.num_output_tokens
        if reading.is_found or reading.num_read < WIDTH or not reading.index.extend(len(prediction)):
            return
        places = reading.index.find(tuple(request.token_ids[-WIDTH:]))
        if places:
            # The nearest place after the last one: insertions and changes are the common edits.
            reading.place = next((place for place in places if place >= reading.place), places[-1])
            reading.is_found = True
