"""Whose turn it is in a queue of prompts: the shortest first, and nobody overtaken for ever.

    due = tokens of all prompts that have come, up to and with this one + patience x tokens that are left to compute

The least is served first. A later prompt Q goes before P only while due(Q) < due(P), so only if fewer than patience x
(what P has left) tokens have come since P did, Q's own included. So all prompts that ever overtake P have together
fewer than patience x (P's tokens) tokens, whatever comes, and when. With patience 0 the order is that of arrival.

No clock is needed: what comes is what makes others due. While a prompt is being computed less of it is left, so it is
due sooner: one that is nearly through is not parked.
"""

PATIENCE = 8  # times its own length of later, shorter ones that a prompt waits for


class Arrivals:
    """What has come to one queue."""

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._num_tokens = 0

    def add(self, num_tokens: int) -> int:
        """A prompt comes; its place in order of arrival: no later one has the same."""
        self._num_tokens += max(num_tokens, 1)
        return self._num_tokens

    def due(self, place: int, num_left: int) -> int:
        """When it is the turn of a prompt that came at `place` and has `num_left` tokens to compute."""
        return place + self._patience * num_left
