"""What waits to be sent to one router: everything that accrues while one message is under way merges into the next.

Bounded by construction: at most `max_tokens` tokens per ticket, one reply per command.
"""

import asyncio

from decode_worker.commands import Emitted, Reserved, TicketFailed
from pdserve.errors import PdserveError
from pdserve.internal.v1 import decode_pb2
from pdserve.request import Ticket
from pdserve.wire import failure_to_wire, ticket_to_wire, token_to_wire

Event = Reserved | Emitted | TicketFailed


class Outbox:
    """Events in, merged messages out; lives on the event loop."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._filled = asyncio.Event()

    def add(self, event: Event) -> None:
        """Append; never waits."""
        self._events.append(event)
        self._filled.set()

    async def take(self) -> decode_pb2.ConnectResponse:
        """All that has accrued, as one message; waits until there is something."""
        await self._filled.wait()  # idle is no error: ends with the stream
        self._filled.clear()
        events, self._events = self._events, []
        return _merged(events)


def _merged(events: list[Event]) -> decode_pb2.ConnectResponse:
    message = decode_pb2.ConnectResponse()
    by_counter: dict[int, decode_pb2.TicketTokens] = {}
    for event in events:
        match event:
            case Emitted(_, counter, token, num_steps):
                if counter not in by_counter:
                    by_counter[counter] = message.tokens.add(counter=counter)
                by_counter[counter].tokens.append(token_to_wire(token))
                by_counter[counter].decode_steps = num_steps
            case Reserved(_, call, Ticket() as ticket):
                message.reserved.add(call=call, ticket=ticket_to_wire(ticket))
            case Reserved(_, call, PdserveError() as error):
                message.reserved.add(call=call, failure=failure_to_wire(error))
            case TicketFailed(_, counter, error):
                message.failures.add(counter=counter, failure=failure_to_wire(error))
    return message
