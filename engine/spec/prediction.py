"""PredictionProposer: follows the text that the request itself predicts (OpenAI's `prediction`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.request import Request
from engine.spec.ngram import NgramIndex

# So many equal tokens show that the output continues at another place of the prediction.
WIDTH = 2
# After more different tokens in a row the place is lost.
MAX_REPLACED = 3


@dataclass(slots=True)
class _Reading:
    """How far the output has followed the prediction."""

    index: NgramIndex
    num_read: int = 0  # output tokens compared so far
    place: int = 0  # the output probably continues here
    num_replaced: int = 0  # last tokens that differed, each taken for a replacement of one token


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
        if reading.num_replaced > MAX_REPLACED:
            return ()
        return request.prediction[reading.place : reading.place + limit]

    def forget(self, request: Request) -> None:
        self._readings.pop(request.handle, None)

    def _read(self, reading: _Reading, request: Request) -> None:
        """Compare the new output tokens with the prediction."""
        prediction = request.prediction
        for position in range(request.num_prompt_tokens + reading.num_read, request.num_tokens):
            place = reading.place
            is_equal = place < len(prediction) and prediction[place] == request.token_ids[position]
            reading.num_replaced = 0 if is_equal else reading.num_replaced + 1
            reading.place += 1
        reading.num_read = request.num_output_tokens
        if not reading.num_replaced or reading.num_read < WIDTH or not reading.index.extend(len(prediction)):
            return
        if places := reading.index.find(tuple(request.token_ids[-WIDTH:])):
            # The nearest place: most edits insert or remove a little.
            reading.place = min(places, key=lambda place: abs(place - reading.place))
            reading.num_replaced = 0
