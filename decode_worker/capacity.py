"""How many requests of given lengths a decode worker holds: a prediction from the rules of `growth` and `tickets`."""

from dataclasses import dataclass

from decode_worker.growth import wanted_pages, watermark
from pdserve.model_card import KvLayout
from pdserve.request import Sampling, WorkRequest


@dataclass(frozen=True)
class Capacity:
    """Of an empty worker, for requests that share no prefix."""

    admitted: int  # tickets that it gives before it refuses one
    to_the_end: int  # of these, how many reach their full length at once without anybody giving way


def capacity(layout: KvLayout, num_pages: int, num_prompt: int, num_completion: int) -> Capacity:
    """For so many tokens per request; a request of one completion token never comes to a decode worker."""
    request = WorkRequest("", (0,) * num_prompt, num_prompt, Sampling(), num_completion)
    first, whole = (wanted_pages(layout, request, num_prompt - 1, whole=whole) for whole in (False, True))
    if whole > num_pages:
        return Capacity(0, 0)
    admitted = max(1, (num_pages - watermark(num_pages)) // first)
    return Capacity(admitted, min(admitted, num_pages // whole))
