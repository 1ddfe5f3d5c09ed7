"""How fast a worker is, in its beats: what its engine has computed, how long it took, and what its machine allows.

The machine's limits are measured once, when the worker starts, on the cores that are its own. Everybody else who is
busy then makes the machine look slower, and the worker afterwards better, than they are: `pdserve doctor` measures
again.
"""

import time
from dataclasses import dataclass, replace
from typing import Any

from cluster.engine_thread import EngineThread
from cluster.worker_node import engine_config
from engine.measure import measure
from engine.tally import Tally
from pdserve.config import NodeConfig
from pdserve.speed import Limits
from pdserve.vitals import Vitals, VitalsSource

READ_BYTES = 2**27  # more than the caches of most machines, and 0.1 s of a start
REPEATS = 3


@dataclass(frozen=True)
class Meter:
    """The vitals of `source`, completed."""

    source: VitalsSource
    thread: EngineThread[Any]
    tally: Tally
    limits: Limits

    def vitals(self) -> Vitals:
        """See VitalsSource."""
        work = self.tally.work(time.monotonic(), self.thread.busy_s())
        return replace(self.source.vitals(), work=work, limits=self.limits)


def measured_limits(config: NodeConfig) -> Limits:
    """Of this worker's device and threads; takes a few tenths of a second."""
    return measure(engine_config(config.cluster, config.model_dir), READ_BYTES, REPEATS).limits
