"""What a runner has computed since it was made. Its thread adds layer by layer, so that a look at it in the middle of
a long pass sees half of the pass; any thread may look."""

from pdserve.speed import Work


class Tally:
    """Two additions per layer."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._flops = 0.0
        self._read_bytes = 0.0
        self._tokens = 0
        self._passes = 0

    def layer_done(self, whole: Work) -> None:
        """A layer of a pass that costs `whole`; all layers count the same, and the lm_head with them."""
        self._flops += whole.flops / self._num_layers
        self._read_bytes += whole.read_bytes / self._num_layers

    def pass_done(self, whole: Work) -> None:
        """Its last layer is done."""
        self._tokens += whole.tokens
        self._passes += 1

    def work(self, clock_s: float, busy_s: float) -> Work:
        """The counters, with what only the owner of the thread knows."""
        return Work(clock_s, busy_s, self._passes, self._tokens, self._flops, self._read_bytes)
