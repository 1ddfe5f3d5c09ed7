"""The idea in one process: a prefill engine, a link, a decode engine. No gRPC, no Ray, no threads.

python examples/one_process.py [MODEL]        (a folder, a .gguf file, a Hub id; default: the demo model)
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from cluster.model_store import resolve
from decode_worker.commands import Decode, Reserve
from decode_worker.service import Receiver
from decode_worker.worker import DecodeWorker
from engine.load import EngineConfig, load_engine
from pdserve.membership import WorkerInfo
from pdserve.request import Incarnation, Sampling, Ticket, WorkerId, WorkRequest
from prefill_worker.commands import Start
from prefill_worker.service import PrefillServicer
from prefill_worker.worker import PrefillWorker
from router.chat import Message
from router.tokenizer import TextModel
from transport.base import LinkConfig, Own
from transport.loopback import Loopback
from transport.receive import DecodeLinks
from transport.send import PrefillLinks


async def relay(model: Path, work: WorkRequest) -> AsyncIterator[int]:
    """Yield the token ids of one completion."""
    engines = [load_engine(EngineConfig(str(model), "model", num_pages=64)) for _ in range(2)]
    config = LinkConfig()
    link = Loopback(config)  # one process; between machines it is Gloo or NCCL, with the same two ends
    sender = Own(WorkerId("prefill"), Incarnation("p"), engines[0].card)
    receiver = Own(WorkerId("decode"), Incarnation("d"), engines[1].card)
    send, receive = PrefillLinks(sender, config, link, link), DecodeLinks(receiver, config, link)
    link.add(receiver.worker, receive)
    send.connect(WorkerInfo(receiver.worker, "decode", receiver.incarnation, "here", 0, receiver.card))
    await send.wait_up(receiver.worker, timeout_s=5)

    prefill = PrefillWorker(engines[0], chunk_tokens=256, slot_bytes=config.slot_bytes)
    decode = DecodeWorker(engines[1], receiver.worker, receiver.incarnation, max_batch=8)
    pusher = PrefillServicer(prefill.submit, send)  # brings what prefill packed to the link
    adopter = asyncio.create_task(Receiver(decode.submit, decode.is_live, receive).run())  # ... and to decode

    decode.submit(Reserve(stream=0, call=0, request=work))  # 1 reserve: "I promise room for this; push it here"
    ticket = decode.step().reserved[0].outcome
    assert isinstance(ticket, Ticket), ticket
    prefill.submit(Start(call=0, request=work, ticket=ticket, link=send.link(ticket.worker, ticket.incarnation)))
    first, is_pushed = None, False
    while not is_pushed:  # 2 prefill: chunk by chunk, pages of finished chunks are pushed meanwhile
        update = prefill.step()
        pusher.deliver(update)
        is_pushed = bool(update.done)
        for sampled in update.sampled:
            first = sampled.token
            yield first.token_id
        await asyncio.sleep(0)
    assert first is not None
    decode.submit(Decode(stream=0, ticket=ticket, first=first))
    while decode.num_requests and not first.finish:  # 3 decode: adopts the pages, runs the token loop
        for emitted in decode.step().emitted:
            yield emitted.token.token_id
    adopter.cancel()
    await send.close()
    await receive.close()


async def main(model: str) -> None:
    """Answer one question."""
    folder = resolve(model).folder
    text = TextModel.load(folder)
    ids = tuple(text.encode_chat([Message("user", "What is the capital of France?")]))
    work = WorkRequest("example", ids, len(ids), Sampling(temperature=0.0), 32, stop_token_ids=frozenset({2}))
    print(text.decode([token_id async for token_id in relay(folder, work)]))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "smollm2"))
