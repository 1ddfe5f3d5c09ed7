"""gRPC as every pdserve process uses it: one way to make servers and channels, one way for errors to cross the wire.

A `PdserveError` leaves a server through `abort` (status, plus google.rpc details) and is the same class again after
`error_of` at the client.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any, NoReturn

import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from pdserve.errors import InvalidRequest, PdserveError, QueueFull, Unavailable, from_wire

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
PARTIAL_OUTPUT = "PARTIAL_OUTPUT"  # reason of a second ErrorInfo beside the error's own
_DOMAIN = "pdserve"
# The pushback of gRPC's retry design (proposal A6): negative means never.
_NO_RETRY = ("grpc-retry-pushback-ms", "-1")

# Proxies and idle clients ping: a server that punishes pings ends idle streams with GOAWAY too_many_pings.
_COMMON_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
_SERVER_OPTIONS = (
    *_COMMON_OPTIONS,
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.so_reuseport", 0),  # a port in use must be an error, not a silent share
    # calls that the event loop has not looked at yet; gRPC cancels some of those beyond 1,000 and all beyond 3,000,
    # without a word why, where our own queue would say when to come back
    ("grpc.server.max_pending_requests", 20_000),
    ("grpc.server.max_pending_requests_hard_limit", 40_000),
)
_CHANNEL_OPTIONS = (
    *_COMMON_OPTIONS,
    ("grpc.use_local_subchannel_pool", 1),  # closing a channel must close its connection
    ("grpc.enable_retries", 0),  # whoever owns the request decides what is tried again
)


def _keepalive(idle_s: float, answer_s: float) -> tuple[tuple[str, int], ...]:
    """A cut or stopped peer is noticed on idle connections too: after `idle_s` it is asked, and must answer in time."""
    return (
        ("grpc.keepalive_time_ms", round(idle_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(answer_s * 1000)),
        ("grpc.http2.ping_timeout_ms", round(answer_s * 1000)),
    )


_INSIDE = _keepalive(2, 2)  # between our own processes: a spare is near
_OUTSIDE = _keepalive(5, 10)  # to clients: their machines and networks have a right to stand still for a moment


def server() -> grpc.aio.Server:
    """A server for our own processes, with no port yet."""
    return grpc.aio.server(options=(*_SERVER_OPTIONS, *_INSIDE), interceptors=(_Parsing(),))


def public_server() -> grpc.aio.Server:
    """A server for clients, with the options that proxies need and no port yet."""
    return grpc.aio.server(options=(*_SERVER_OPTIONS, *_OUTSIDE), interceptors=(_Parsing(),))


def channel(address: str) -> grpc.aio.Channel:
    """A channel of its own to one of our processes at `host:port`: closing it ends every call on it."""
    return grpc.aio.insecure_channel(address, options=(*_CHANNEL_OPTIONS, *_INSIDE))


def client_channel(address: str) -> grpc.aio.Channel:
    """The same, of a client to a router. Raises InvalidRequest."""
    if not address:
        raise InvalidRequest("address", "is empty; must be the host:port of a router")
    return grpc.aio.insecure_channel(address, options=(*_CHANNEL_OPTIONS, *_OUTSIDE))


def listen(grpc_server: grpc.aio.Server, host: str, port: int) -> int:
    """Bind and return the port; `port` 0 takes a free one. Raises Unavailable when the port is taken."""
    try:
        return grpc_server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise Unavailable(f"cannot listen on {host}:{port}: {error}") from error


def add_health_and_reflection(grpc_server: grpc.aio.Server, services: Sequence[str]) -> "Health":
    """Serve grpc.health.v1 and reflection beside `services`; all are NOT_SERVING until `Health.set` says otherwise."""
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, grpc_server)
    reflection.enable_server_reflection([*services, health.SERVICE_NAME, reflection.SERVICE_NAME], grpc_server)
    return Health(servicer, ["", "readiness", *services])


class Health:
    """The serving state of one server."""

    def __init__(self, servicer: health.aio.HealthServicer, names: Sequence[str]) -> None:
        self._servicer = servicer
        self._names = names

    async def set(self, serving: bool) -> None:
        """Report SERVING or NOT_SERVING for the server and each of its services; "liveness" is always SERVING."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._names:
            await self._servicer.set(name, status)
        await self._servicer.set("liveness", health_pb2.HealthCheckResponse.SERVING)


class _Parsing(grpc.aio.ServerInterceptor):
    """Answers bytes that are no message with INVALID_ARGUMENT, where gRPC would log a trace and say UNKNOWN."""

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(handler_call_details)
        inner = handler and (
            handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        )
        if not (inspect.iscoroutinefunction(inner) or inspect.isasyncgenfunction(inner)):
            return handler

        async def parsed(raw: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            parse = handler.request_deserializer
            try:
                request = _Messages(raw, parse) if handler.request_streaming else _message(raw, parse)
                if inspect.iscoroutinefunction(inner):
                    return await inner(request, context)
                async with aclosing(inner(request, context)) as responses:
                    async for response in responses:
                        await context.write(response)
            except InvalidRequest as error:
                await abort(context, error)

        make = _HANDLERS[handler.request_streaming, handler.response_streaming]
        return make(parsed, None, handler.response_serializer)


_HANDLERS: dict[tuple[bool, bool], Callable[..., Any]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


class _Messages:
    """The messages of a client's stream. Raises InvalidRequest where one is none."""

    def __init__(self, raws: AsyncIterator[bytes], parse: Callable[[bytes], Message]) -> None:
        self._raws = raws
        self._parse = parse

    def __aiter__(self) -> "_Messages":
        return self

    async def __anext__(self) -> Message:
        return _message(await anext(self._raws), self._parse)


def _message(raw: bytes, parse: Callable[[bytes], Message]) -> Message:
    try:
        return parse(raw)
    except DecodeError as error:
        raise InvalidRequest("request", f"is not a message of this method ({error})") from None


def status_of(error: PdserveError) -> status_pb2.Status:
    """The error as google.rpc.Status: code, message and details."""
    status = status_pb2.Status(code=code_pb2.Code.Value(error.status), message=_shortened(str(error)))
    info = error_details_pb2.ErrorInfo(reason=type(error).__name__, domain=_DOMAIN)
    status.details.append(_packed(info))
    if isinstance(error, InvalidRequest):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=_shortened(error.problem)
        )
        status.details.append(_packed(error_details_pb2.BadRequest(field_violations=[violation])))
    if isinstance(error, QueueFull):
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(error.retry_after_s * 1000))
        status.details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    return status


def _shortened(text: str) -> str:
    """Without its middle, where a client's own value made it long: beyond 8 KiB of headers the whole error is lost."""
    limit = 1000 if text.isascii() else 300  # characters; in headers one takes up to twelve bytes, and comes twice
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"


def _packed(
    detail: error_details_pb2.ErrorInfo | error_details_pb2.BadRequest | error_details_pb2.RetryInfo,
) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: PdserveError) -> NoReturn:
    """End the call with the error's status and details."""
    await _end(context, status_of(error))
    raise AssertionError("abort returned")


async def abort_partial(
    context: grpc.aio.ServicerContext[Any, Any], error: PdserveError, delivered_tokens: int
) -> NoReturn:
    """End a stream of which the client has so many tokens, and tell retry middleware not to replay it."""
    status = status_of(error)
    status.message += f"; {delivered_tokens} tokens were delivered: `resume` goes on from there"
    metadata = {"delivered_tokens": str(delivered_tokens)}
    info = error_details_pb2.ErrorInfo(reason=PARTIAL_OUTPUT, domain=_DOMAIN, metadata=metadata)
    status.details.append(_packed(info))
    await _end(context, status, _NO_RETRY)
    raise AssertionError("abort returned")


async def _end(
    context: grpc.aio.ServicerContext[Any, Any], status: status_pb2.Status, *metadata: tuple[str, str]
) -> None:
    ending = rpc_status.to_status(status)
    context.set_trailing_metadata((*ending.trailing_metadata, *metadata))
    try:
        await context.abort(ending.code, ending.details)
    except grpc.aio.InternalError:
        # The call has ended already, or its deadline cut a write off: nobody can be told any more. So the handler ends
        # as gRPC ends one whose client is gone.
        raise asyncio.CancelledError from None


def error_of(error: grpc.aio.AioRpcError) -> PdserveError:
    """The typed error behind a failed call; a transport failure is `Unavailable`."""
    status = rpc_status.from_call(error)  # type: ignore[arg-type]  # AioRpcError has all that it reads
    for detail in status.details if status else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.domain == _DOMAIN:  # the first one is its own
            return from_wire(info.reason, status.message)
    return Unavailable(f"{error.code().name}: {error.details()}")


def is_refusal(error: grpc.aio.AioRpcError) -> bool:
    """Whether the call failed with a server's own error, not because of the connection."""
    return rpc_status.from_call(error) is not None  # type: ignore[arg-type]  # as above
