"""TextRouter: the Router for servers that do not report their prefix caches, such as those of other projects.

It knows prompts as bytes, and assumes that a server still caches the prompts that were sent to it last. Four bytes
count as a token, so block sizes and costs are about those of a tokenised prompt.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from engine.config_fields import RouterPolicy
from engine.front.router import Router, Ticket, rank
from engine.messages import AddRequest, KVEvents, NewCompletion
from engine.sampling_params import SamplingParams

BYTES_PER_TOKEN = 4
BLOCK_SIZE = 16
MAX_LOAD_RATIO = 1.25  # of a server's number of requests to the mean
MAX_PROMPT_BYTES = 2**18  # later bytes do not influence the choice
# Remembered blocks of each server, least recently used ones are dropped: 4 MiB of text, about 1 M tokens.
MAX_BLOCKS = 2**16
COMPLETION = NewCompletion(0, 0)
PARAMS = SamplingParams()


class TextRouter(Router):
    """Servers are identified by number. End each ticket with `end`."""

    def __init__(self, policy: RouterPolicy, num_servers: int) -> None:
        super().__init__(policy, BLOCK_SIZE)
        self._recent: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(num_servers)]
        for server in range(num_servers):
            self.reset(server)

    def choose_text(
        self, prompt: bytes, candidates: Sequence[int], salt: str | None = None, session: str | None = None
    ) -> Ticket:
        """Choose one of the candidates, at least one, and add the request to its load.

        No server gets more than MAX_LOAD_RATIO times the mean load, because what it caches is only assumed.

        Args:
            salt: prompts share prefixes with those of the same salt only.
            session: requests of a session go to the same server while its load allows that.
        """
        counts = {server: self.count_requests(server) for server in candidates}
        limit = MAX_LOAD_RATIO * (1 + sum(counts.values())) / len(counts)
        allowed = [server for server in candidates if counts[server] < limit]
        if session is not None:
            key = session.encode("utf-8", "surrogatepass")
            allowed = [min(allowed, key=lambda server: rank(key, server))]
        data = prompt[:MAX_PROMPT_BYTES]
        tokens = array("I", data + bytes(-len(data) % BYTES_PER_TOKEN))
        message = AddRequest("", tokens.tolist(), PARAMS, [COMPLETION], cache_salt=salt)
        ticket = self.choose(message, allowed)
        self._remember(ticket)
        return ticket

    def forget(self, server: int) -> None:
        """Assume an empty cache, because the server was away."""
        self.note_events(server, KVEvents(removed=list(self._recent[server])))
        self._recent[server].clear()

    def _remember(self, ticket: Ticket) -> None:
        recent = self._recent[ticket.replica]
        # From the end of the prompt, so that the start is dropped last.
        for block_hash in reversed(ticket.hashes):
            recent[block_hash] = None
            recent.move_to_end(block_hash)
        dropped = [recent.popitem(last=False)[0] for _ in range(len(recent) - MAX_BLOCKS)]
        self.note_events(ticket.replica, KVEvents(stored=ticket.hashes, removed=dropped))
