"""grpc.aio's server, as far as our servicers use it: their real coroutines run in tasks of their host.

A call's life: started -> the servicer's coroutine reads and writes -> returned, aborted, or cancelled because the
client left or the connection broke. What a servicer raises beyond that is a finding.
"""

import asyncio
import traceback
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, NoReturn

import grpc
import grpc.aio

from tests.chaos.simulation.network import Network, Pipe
from tests.chaos.simulation.virtual_loop import Host

Metadata = Sequence[tuple[str, str | bytes]]


def failure(code: grpc.StatusCode, details: str, trailing: Metadata = ()) -> grpc.aio.AioRpcError:
    """How a client sees a call end badly."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details)


class Server:
    """Listens at one address, until its host dies."""

    def __init__(self, network: Network, host: Host, address: str) -> None:
        self.network = network
        self.host = host
        self.methods: dict[str, Any] = {}
        network.servers[address] = self

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """The generated code calls both; the other one is enough."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """What a stub may call."""
        self.methods.update((f"/{service}/{name}", handler) for name, handler in handlers.items())


class ServerCall:
    """One call, from the server's side; also the servicer's context."""

    def __init__(
        self, server: Server, method: str, requests: Pipe, responses: Pipe, on_end: Callable[[], None]
    ) -> None:
        self.host = server.host
        self._network = server.network
        self._name = method
        self._handler = server.methods[method]
        self._requests = requests
        self._responses = responses
        self._on_end = on_end
        self._metadata: Metadata = ()
        self._trailing: Metadata = ()
        self._deadline: float | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_over = False

    def start(self, metadata: Metadata, deadline: float | None) -> None:
        """Run the servicer."""
        self._metadata = metadata
        self._deadline = deadline
        self._task = self.host.spawn(self._run(), f"{self.host.name}: serves {self._name}")

    def cancel(self) -> None:
        """The client is gone."""
        self._is_over = True
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            await self._serve()
        except grpc.aio.AbortError:
            pass  # `abort` has said it
        except asyncio.CancelledError:
            self._responses.close(failure(grpc.StatusCode.CANCELLED, "the server cancelled the call"))
        except Exception:  # root of the call: a finding of the run; the client gets UNKNOWN, as from gRPC
            self._network.problems.append(f"{self.host.name} {self._name}: {traceback.format_exc()}")
            self._responses.close(failure(grpc.StatusCode.UNKNOWN, "the servicer failed"))
        else:
            self._responses.close()
        self._is_over = True
        self._requests.break_off(asyncio.CancelledError())
        self._on_end()

    async def _serve(self) -> None:
        handler = self._handler
        if handler.request_streaming:
            await handler.stream_stream(self._stream(), self)
            return
        data = await self._requests.get()
        assert data is not None
        request = handler.request_deserializer(data)
        if handler.response_streaming:
            await handler.unary_stream(request, self)
        else:
            self._responses.put(handler.response_serializer(await handler.unary_unary(request, self)))

    async def _stream(self) -> AsyncIterator[Any]:
        while True:
            try:
                data = await self._requests.get()
            except grpc.aio.AioRpcError:
                return  # the connection broke: the handler is cancelled too
            if data is None:
                return
            yield self._handler.request_deserializer(data)

    async def write(self, message: Any) -> None:
        """Send a response; waits while the client is far behind."""
        if self._is_over:
            raise grpc.aio.UsageError("RPC already finished.")
        self._responses.put(self._handler.response_serializer(message))
        await self._responses.room()

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> NoReturn:
        """End the call with this status."""
        self._responses.close(failure(code, details, tuple(trailing_metadata) or self._trailing))
        raise grpc.aio.AbortError("Locally aborted.")

    def set_trailing_metadata(self, metadata: Metadata) -> None:
        """Sent with the status."""
        self._trailing = tuple(metadata)

    def invocation_metadata(self) -> Metadata:
        """What the client said beside its request."""
        return self._metadata

    def time_remaining(self) -> float | None:
        """Until the client's deadline."""
        return None if self._deadline is None else max(0.0, self._deadline - self._network.loop.time())

    def cancelled(self) -> bool:
        """Whether the client is gone."""
        return self._is_over
