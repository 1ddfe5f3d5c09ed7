"""How much of a prompt has landed: blocks of pages, and of each block the layers from 0 upwards. Plain counting."""

from dataclasses import dataclass

from pdserve.errors import ProtocolError
from pdserve.handover import PageRun


@dataclass(eq=False)
class Landing:
    """The prompt of one ticket on its way."""

    num_pages: int  # of the prompt
    num_layers: int  # of a page
    num_landed: int  # pages that are complete: the cached ones from the beginning
    _block_pages: int = 0  # of the block under way
    _block_layers: int = 0  # of it that have landed; 0: none is under way

    @property
    def is_complete(self) -> bool:
        """Whether all the prompt's KV is here."""
        return self.num_landed == self.num_pages

    def advance(self, run: PageRun) -> bool:
        """Note a run; returns whether it begins a block. Raises ProtocolError unless it is what comes next."""
        if not self._is_next(run):
            raise ProtocolError(f"{run} landed where page {self.num_landed}, layer {self._block_layers} was expected")
        self._block_pages, self._block_layers = run.num_pages, self._block_layers + run.num_layers
        if self._block_layers == self.num_layers:
            self.num_landed, self._block_layers = self.num_landed + run.num_pages, 0
        return run.first_layer == 0

    def _is_next(self, run: PageRun) -> bool:
        allowed = [self._block_pages] if self._block_layers else range(1, self.num_pages - self.num_landed + 1)
        return (
            (run.first_page, run.first_layer) == (self.num_landed, self._block_layers)
            and run.num_pages in allowed
            and 0 < run.num_layers <= self.num_layers - self._block_layers
        )
