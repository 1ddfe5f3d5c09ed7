"""The numbers of one run: how many of what, how large, how fast."""

from dataclasses import dataclass

from tests.chaos.simulation.network import Weather
from transport.base import LinkConfig


@dataclass(frozen=True)
class Shape:
    """Drawn from the seed by `scenario`."""

    routers: int
    prefills: int
    decodes: int
    prefill_pages: int
    decode_pages: int
    block_tokens: int  # decode_worker.growth.BLOCK_TOKENS
    chunk_tokens: int
    max_batch: int
    link: LinkConfig
    weather: Weather
    verify_kv: bool
    queue_limit: int = 64
    stuck_after_s: float = 2.0
    same_address: bool = False  # a restarted worker listens where the old one did
