"""One role in one process: builds the parts of a prefill worker, a decode worker or a router, and runs them.

    python -m cluster.node NODE.json         (a router, as `up` starts it; workers run in Ray actors)

Of several routers with the same file one serves; the others are its spares.

A worker loads its model, serves, registers, and ends when its engine or its links fail: whoever started it starts it
again, as a new incarnation. Or it has been drained, and stays away. A router ends when it is told to.
"""

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pdserve.config import NodeConfig

_log = logging.getLogger(__name__)


def run_worker(config: NodeConfig) -> str:
    """Run a prefill or decode worker in this thread: returns how it left for good, raises what else ended it."""
    os.sched_setaffinity(0, config.cores or os.sched_getaffinity(0))
    if config.role == "prefill":
        from cluster.prefill_node import serve_prefill as serve
    else:
        from cluster.decode_node import serve_decode as serve
    return asyncio.run(serve(config))


def main(arguments: Sequence[str]) -> None:
    """Run the role of the configuration file named on the command line."""
    path = Path(arguments[0])
    config = NodeConfig.from_json(path.read_text(encoding="utf-8"))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if config.role != "router":
        run_worker(config)
        return
    from cluster.router_node import serve_router

    asyncio.run(serve_router(config, path))


if __name__ == "__main__":
    main(sys.argv[1:])
