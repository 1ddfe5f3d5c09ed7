"""A decode worker in this process."""

from cluster.chaos import Chaos
from cluster.drain import Drain
from cluster.engine_thread import EngineThread
from cluster.meter import Meter, measured_limits
from cluster.worker_node import WorkerServer, link_config, load, own_end
from cluster.worker_service import Control
from decode_worker import commands
from decode_worker.commands import StepUpdate
from decode_worker.service import DecodeServicer, Receiver
from decode_worker.worker import DecodeWorker
from pdserve.config import NodeConfig
from pdserve.internal.v1 import decode_pb2_grpc, link_pb2_grpc
from transport.control import LinkServicer, decode_links

SERVICES = ("pdserve.internal.v1.DecodeService", "pdserve.internal.v1.LinkService")


async def serve_decode(config: NodeConfig) -> str:
    """Load, serve, register; returns how the worker left for good, raises when it is of no use any more."""
    engine = load(config)
    own = own_end(config, engine)
    worker = DecodeWorker(engine, own.worker, own.incarnation, config.cluster.max_batch)
    links = decode_links(own, link_config(config, engine), engine.cache.pages.device)
    receiver = Receiver(worker.submit, worker.is_live, links)
    servicer = DecodeServicer(worker.submit, receiver)
    thread: EngineThread[StepUpdate] = EngineThread(worker, servicer.deliver)
    server = WorkerServer(config, "decode", own)
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(servicer, server.grpc)
    link_pb2_grpc.add_LinkServiceServicer_to_server(LinkServicer(links), server.grpc)
    chaos = Chaos(config.cluster.chaos, links)
    meter = Meter(thread, thread, engine.runner.tally, measured_limits(config))
    control = Control(thread, meter, Drain(worker, commands.Drain(), commands.Expel), chaos)
    thread.start()
    try:
        return await server.run(
            control, SERVICES, [thread.watch(config.cluster.stuck_after_s), links.fatal, receiver.run()]
        )
    finally:
        await links.close()
        await thread.stop()
