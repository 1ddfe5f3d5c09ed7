"""What Ray starts and starts again: one worker in one actor process.

`run` returns when the worker has left for good, and raises when it is of no use any more. A process that dies instead
is started again by Ray, which also calls `run` again: a new incarnation.
"""

import logging
from pathlib import Path

from pdserve.config import NodeConfig


class WorkerActor:
    """Runs one worker in the main thread of its process."""

    def run(self, node: str) -> str:
        """Run the worker of this NodeConfig, as JSON; returns how it left, raises what else ended it."""
        config = NodeConfig.from_json(node)
        _log_to(config)
        logging.getLogger(__name__).info("%s starts", config.worker_id)
        from cluster.node import run_worker  # torch and all: here, so that the import is in the log, too

        return run_worker(config)


def _log_to(config: NodeConfig) -> None:
    handler = logging.FileHandler(Path(config.log_dir) / f"{config.worker_id}.log") if config.log_dir else None
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s",
        handlers=[handler] if handler else None,
        force=True,
    )
