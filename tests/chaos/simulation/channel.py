"""grpc.aio's channel and calls, as far as our stubs use them, over `Network`.

Messages are serialized and parsed, so that the two ends share nothing. As in grpc.aio: whoever reads a call that it has
cancelled gets CancelledError; a reader that is cancelled cancels its call; the reader of our requests goes on until the
requests themselves end.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

import grpc
import grpc.aio

from tests.chaos.simulation.network import Network, Pipe
from tests.chaos.simulation.server import ServerCall, failure
from tests.chaos.simulation.virtual_loop import Host

RETRY_S = 0.2  # of connecting

Metadata = Sequence[tuple[str, str | bytes]]


class Channel:
    """A connection from one host to an address."""

    def __init__(self, network: Network, client: Host, address: str) -> None:
        self.network = network
        self.client = client
        self.address = address
        self.calls: dict[ClientCall, None] = {}

    def unary_stream(
        self, method: str, request_serializer: Any, response_deserializer: Any, **_: object
    ) -> Callable[..., Any]:
        """A stub's method."""
        return self._multicallable(method, request_serializer, response_deserializer)

    unary_unary = stream_stream = unary_stream

    def _multicallable(self, method: str, serialize: Any, deserialize: Any) -> Callable[..., Any]:
        def call(
            request: Any, timeout: float | None = None, metadata: Metadata = (), wait_for_ready: bool = False
        ) -> ClientCall:
            made = ClientCall(self, method, deserialize)
            made.start(request, serialize, tuple(metadata), timeout, wait_for_ready)
            return made

        return call

    async def close(self, grace: float | None = None) -> None:
        """Cancel all calls."""
        for call in list(self.calls):
            call.cancel()

    async def __aenter__(self) -> "Channel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class ClientCall:
    """One call, from the client's side."""

    def __init__(self, channel: Channel, method: str, deserialize: Any) -> None:
        self._channel = channel
        self._network = network = channel.network
        self._method = method
        self._deserialize = deserialize
        self.client = channel.client
        self._is_broken = False
        self._served: ServerCall | None = None
        self._is_cancelled = False
        self._poller: asyncio.Task[None] | None = None
        target = network.servers.get(channel.address)
        self.server_host = target.host if target else None
        far = target.host if target else channel.client
        name = f"{self.client.name} {method.rpartition('/')[2]} {channel.address}"
        self._requests = Pipe(network, self.client, far, f"{name} >")
        self._responses = Pipe(network, far, self.client, f"{name} <")

    @property
    def server_name(self) -> str:
        """Of the host that answers, once there is one."""
        return self.server_host.name if self.server_host else ""

    def start(
        self, request: Any, serialize: Any, metadata: Metadata, timeout: float | None, wait_for_ready: bool
    ) -> None:
        """Begin to connect, and to send."""
        self._channel.calls[self] = self._network.calls[self] = None
        if hasattr(request, "__aiter__"):
            name = f"{self.client.name}: sends {self._method}"
            self._poller = self.client.spawn(self._poll(request, serialize), name)
        else:
            self._requests.put(serialize(request))
            self._requests.close()
        deadline = self._network.loop.time() + timeout if timeout is not None else None
        self._network.later(self._network.delay(), lambda: self._connect(metadata, deadline, wait_for_ready))

    async def _poll(self, requests: AsyncIterator[Any], serialize: Any) -> None:
        async for request in requests:
            if self._requests.is_closed:
                return
            self._requests.put(serialize(request))
            await self._requests.room()
        self._requests.close()

    def _connect(self, metadata: Metadata, deadline: float | None, wait_for_ready: bool) -> None:
        if self.is_done or self._is_broken or self.client.is_dead:
            return
        again = partial(self._connect, metadata, deadline, wait_for_ready)
        server = self._network.servers.get(self._channel.address)
        if server is not None and not server.host.is_dead:
            if self._network.are_apart(self.client, server.host):
                self._network.dam(again)
                return
            self.server_host = server.host
            self._served = ServerCall(server, self._method, self._requests, self._responses, self._forget)
            self._served.start(metadata, deadline)
        elif wait_for_ready:
            self._network.later(RETRY_S, again)
        else:
            self._end(failure(grpc.StatusCode.UNAVAILABLE, f"nobody listens at {self._channel.address}"))

    @property
    def is_done(self) -> bool:
        """Whether nothing more can come."""
        return self._is_cancelled or self._responses.is_over

    def _forget(self) -> None:
        self._network.calls.pop(self, None)
        self._channel.calls.pop(self, None)

    def _end(self, error: Exception) -> None:
        self._requests.break_off(error)
        self._responses.break_off(error)
        self._forget()

    def break_off(self) -> None:
        """The connection is gone: each end learns of it in its own time."""
        lost = failure(grpc.StatusCode.UNAVAILABLE, "the connection broke")
        self._is_broken = True
        self._requests.lose()
        self._responses.lose()
        self._network.later(self._network.notice_s(), lambda: self._responses.break_off(lost))
        self._network.later(self._network.notice_s(), lambda: self._lose_server(lost))
        self._forget()

    def _lose_server(self, lost: Exception) -> None:
        if self._served is not None:
            self._served.cancel()
        self._requests.break_off(lost)

    def cancel(self) -> bool:
        """Leave: the server learns of it later."""
        if self.is_done:
            return False
        self._is_cancelled = True
        if self._poller is not None:
            self._poller.cancel()
        if served := self._served:
            self._network.later(self._network.delay(), lambda: self._cancel_served(served))
        self._responses.break_off(asyncio.CancelledError())  # what a local reader gets
        self._requests.is_closed = True
        self._forget()
        return True

    def _cancel_served(self, served: ServerCall) -> None:
        if self._network.are_apart(self.client, served.host):
            self._network.dam(lambda: self._cancel_served(served))
            self._network.later(4.0, served.cancel)
        else:
            served.cancel()

    def cancelled(self) -> bool:
        """Whether `cancel` came in time."""
        return self._is_cancelled

    async def read(self) -> Any:
        """The next response, or EOF. Raises AioRpcError."""
        try:
            data = await self._responses.get()
        except asyncio.CancelledError:
            self.cancel()
            raise
        return grpc.aio.EOF if data is None else self._deserialize(data)

    def __aiter__(self) -> "ClientCall":
        return self

    async def __anext__(self) -> Any:
        if (response := await self.read()) is grpc.aio.EOF:
            raise StopAsyncIteration
        return response

    def __await__(self) -> Any:
        return self.read().__await__()
