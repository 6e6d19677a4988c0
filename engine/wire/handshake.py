"""The handshake of every TCP connection: both sides prove that they know a shared key.

    server ──Challenge(nonce)──▶ client
    server ◀──Greeting(rank, nonce, proof)── client       proof: HMAC-SHA256 of service, side and both nonces
    server ──Welcome(proof)──▶ client

`greet` and `introduce` do all of it over a Channel. The other functions make and verify the messages that an
asynchronous Link sends. The key authenticates the connection; what follows is neither encrypted nor signed, so use a
private network.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Any, Literal

from engine.wire.frames import Channel
from engine.wire.link_messages import PROTOCOL_VERSION, Challenge, Greeting, Welcome

MAX_BYTES = 4096  # largest frame of a peer that has proved nothing
TIMEOUT_S = 10.0

Service = Literal["replica", "rank", "blocks"]  # a proof for one is none for another


class PeerRefused(ConnectionError):
    """The server refuses this client, or does not know the key."""


def greet(channel: Channel, service: Service, key: str) -> int:
    """Exchange proofs with a client. Returns its rank.

    Raises:
        PeerRefused: it does not know the key; it has been told so.
        OSError: the connection ended.
    """
    challenge = make_challenge()
    channel.send(challenge)
    greeting = channel.receive(MAX_BYTES)
    welcome = verify(greeting, challenge, service, key)
    channel.send(welcome)
    if welcome.error is not None:
        raise PeerRefused(welcome.error)
    rank: int = greeting.rank
    return rank


def introduce(channel: Channel, service: Service, key: str, rank: int = 0) -> None:
    """Exchange proofs with a server. Raises PeerRefused as `answer` and `check` do."""
    challenge = channel.receive(MAX_BYTES)
    greeting = answer(challenge, service, key, rank)
    channel.send(greeting)
    check(channel.receive(MAX_BYTES), challenge, greeting, service, key)


def make_challenge() -> Challenge:
    return Challenge(PROTOCOL_VERSION, secrets.token_bytes(32))


def answer(challenge: Any, service: Service, key: str, rank: int = 0) -> Greeting:
    """Raises PeerRefused: the server has another version."""
    if not isinstance(challenge, Challenge) or challenge.version != PROTOCOL_VERSION:
        raise PeerRefused(f"it does not speak version {PROTOCOL_VERSION} of the protocol")
    nonce = secrets.token_bytes(32)
    return Greeting(PROTOCOL_VERSION, rank, nonce, make_proof(key, f"{service} {rank}", challenge.nonce, nonce))


def verify(greeting: Any, challenge: Challenge, service: Service, key: str) -> Welcome:
    """Return the reply to a greeting. It has an error if the client must be refused."""
    if not isinstance(greeting, Greeting):
        return Welcome(error=f"expected a Greeting, and received {type(greeting).__name__}")
    if greeting.version != PROTOCOL_VERSION:
        return Welcome(
            error=f"the {service} speaks version {greeting.version} of the protocol, and the server {PROTOCOL_VERSION}"
        )
    expected = make_proof(key, f"{service} {greeting.rank}", challenge.nonce, greeting.nonce)
    if not hmac.compare_digest(greeting.proof, expected):
        return Welcome(error="data_parallel_key differs from that of the server")
    return Welcome(make_proof(key, f"{service} server", greeting.nonce, challenge.nonce))


def check(welcome: Any, challenge: Challenge, greeting: Greeting, service: Service, key: str) -> Welcome:
    """Return the server's welcome.

    Raises:
        PeerRefused: it is none, or does not prove that the server knows the key.
    """
    if not isinstance(welcome, Welcome) or welcome.error is not None:
        raise PeerRefused(f"the server refuses this {service}: {getattr(welcome, 'error', 'no welcome')}")
    if not hmac.compare_digest(welcome.proof, make_proof(key, f"{service} server", greeting.nonce, challenge.nonce)):
        raise PeerRefused("the server does not know data_parallel_key")
    return welcome


def make_proof(key: str, side: str, first: bytes, second: bytes) -> bytes:
    """Return the proof of one side."""
    return hmac.digest(key.encode(), side.encode() + first + second, hashlib.sha256)
