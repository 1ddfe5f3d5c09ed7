"""Who is there, by way of Redis: discovery only.

A worker's record: `Registration` writes it under the worker's id at start and every two seconds after that, and leaves
a tombstone at the end; a new incarnation overwrites both. `RegistryMembership` reads all records once a second, and at
once when somebody announces a change. A record that vanishes means nothing: Redis may have restarted empty, or be gone.
A worker leaves the view by its tombstone only; liveness is found out elsewhere, on streams to the worker itself.

    pdserve:{namespace}:ids           set of worker ids
    pdserve:{namespace}:worker:{id}   JSON of the record, or of the tombstone
    pdserve:{namespace}:changes       channel: "look again"
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from types import TracebackType

import redis
from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from pdserve.membership import WorkerInfo
from pdserve.plain import from_plain, to_plain
from pdserve.request import Incarnation, WorkerId

PERIOD_S = 2.0  # between registrations
RECORD_TTL_S = 10  # of a record: a new router does not see workers that are long dead
TOMBSTONE_TTL_S = 60  # long enough for every router to have looked
LOOK_S = 1.0  # between looks without an announcement
BACKOFF_S = (0.25, 2.0)  # first and longest wait while Redis is away
COMMAND_TIMEOUT_S = 2.0

_TOMBSTONE = "left"
# Only over the own record: a new incarnation may be there already.
_LEAVE = """
local record = redis.call('GET', KEYS[1])
if record and cjson.decode(record).incarnation ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[3])
return 1
"""

_AWAY = (redis.RedisError, TimeoutError)

log = logging.getLogger(__name__)


def to_json(info: WorkerInfo) -> str:
    """The record of a worker; `from_json` gives an equal object."""
    return json.dumps(to_plain(info))


def from_json(text: str) -> WorkerInfo:
    """Read a record; raises ValueError for anything but what `to_json` writes."""
    return from_plain(WorkerInfo, json.loads(text))


class Registration:
    """Async context manager: the worker is registered inside, and has left outside."""

    def __init__(self, url: str, namespace: str, info: WorkerInfo) -> None:
        self._client = _client(url)
        self._keys = _Keys(namespace)
        self._info = info
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Registration":
        self._task = asyncio.create_task(self._keep_registered(), name="registration")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.wait([self._task])
        try:
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                await self._leave()
        except _AWAY as gone:
            log.warning("%s could not deregister: %s", self._info.id, gone)
        await self._client.aclose()

    async def _keep_registered(self) -> None:
        outage = _Outage()
        while True:
            try:
                async with asyncio.timeout(COMMAND_TIMEOUT_S):
                    await self._register()
            except _AWAY as error:
                await outage.wait(error)
            else:
                outage.over()
                await asyncio.sleep(PERIOD_S)

    async def _register(self) -> None:
        record = to_json(self._info)
        async with self._client.pipeline() as pipe:
            pipe.sadd(self._keys.ids, self._info.id)
            pipe.set(self._keys.worker(self._info.id), record, ex=RECORD_TTL_S, get=True)
            pipe.expire(self._keys.ids, TOMBSTONE_TTL_S)
            _, before, _ = await pipe.execute()
        if before != record:
            await self._client.publish(self._keys.changes, self._info.id)

    async def _leave(self) -> None:
        tombstone = json.dumps({"incarnation": self._info.incarnation, _TOMBSTONE: True})
        key, args = self._keys.worker(self._info.id), (self._info.incarnation, tombstone, TOMBSTONE_TTL_S)
        await self._client.eval(_LEAVE, 1, key, *args)
        await self._client.publish(self._keys.changes, self._info.id)


class RegistryMembership:
    """`pdserve.membership.Membership` over Redis: the last view stands for as long as Redis is away."""

    def __init__(self, url: str, namespace: str) -> None:
        self._url = url
        self._keys = _Keys(namespace)

    async def views(self) -> AsyncGenerator[tuple[WorkerInfo, ...], None]:
        """Yield the present members, sorted by id, at once, then again after every change."""
        view: tuple[WorkerInfo, ...] = ()
        yielded = False
        outage = _Outage()
        async with _client(self._url) as client, client.pubsub() as changes:
            while True:
                try:
                    async with asyncio.timeout(COMMAND_TIMEOUT_S):
                        records = await self._read(client, changes)
                except _AWAY as error:
                    await outage.wait(error)
                    continue
                outage.over()
                new = merged(view, records)
                if new != view or not yielded:
                    view, yielded = new, True
                    yield view
                await self._next_look(changes)

    async def _read(self, client: Redis, changes: PubSub) -> dict[str, str]:
        if not changes.subscribed:  # before reading, so that no change falls between
            await changes.subscribe(self._keys.changes)
        ids = sorted(str(id) for id in await client.smembers(self._keys.ids))
        texts = await client.mget([self._keys.worker(id) for id in ids]) if ids else []
        return {id: str(text) for id, text in zip(ids, texts, strict=True) if text}

    async def _next_look(self, changes: PubSub) -> None:
        try:
            await changes.get_message(ignore_subscribe_messages=True, timeout=LOOK_S)
        except _AWAY:
            await asyncio.sleep(LOOK_S)  # the client reconnects and subscribes again by itself


def merged(view: tuple[WorkerInfo, ...], records: dict[str, str]) -> tuple[WorkerInfo, ...]:
    """The next view: records add and replace, tombstones remove, what is missing changes nothing."""
    members = {info.id: info for info in view}
    for id, text in records.items():
        try:
            _apply(members, WorkerId(id), text)
        except ValueError as error:
            log.warning("the registry's record of %s is not ours: %s", id, error)
    return tuple(members[id] for id in sorted(members))


def _apply(members: dict[WorkerId, WorkerInfo], id: WorkerId, text: str) -> None:
    if incarnation := _tombstone(text):
        if id in members and members[id].incarnation == incarnation:
            del members[id]
        return
    info = from_json(text)
    if info.id != id:
        raise ValueError(f"it names {info.id}")
    members[id] = info


def _tombstone(text: str) -> Incarnation | None:
    plain = json.loads(text)
    if not isinstance(plain, dict) or not plain.get(_TOMBSTONE):
        return None
    return Incarnation(str(plain.get("incarnation", "")))


class _Keys:
    """Names in Redis, of one cluster."""

    def __init__(self, namespace: str) -> None:
        self._prefix = f"pdserve:{namespace}"
        self.ids = f"{self._prefix}:ids"
        self.changes = f"{self._prefix}:changes"

    def worker(self, id: str) -> str:
        return f"{self._prefix}:worker:{id}"


class _Outage:
    """Waits longer and longer while Redis is away; says so once."""

    def __init__(self) -> None:
        self._wait_s = 0.0

    async def wait(self, error: Exception) -> None:
        if not self._wait_s:
            log.warning("Redis is away, going on with what is known: %s", str(error) or "no answer")
        self._wait_s = min(self._wait_s * 2 or BACKOFF_S[0], BACKOFF_S[1])
        await asyncio.sleep(self._wait_s)

    def over(self) -> None:
        if self._wait_s:
            log.info("Redis is back")
        self._wait_s = 0.0


def _client(url: str) -> Redis:
    # no retries and timeouts inside the client: who waits, and for how long, is decided here
    client: Redis = Redis.from_url(
        url,
        decode_responses=True,
        retry=Retry(NoBackoff(), 0),
        # its own timeout goes through asyncio.wait_for, which can swallow a cancellation in Python 3.11
        socket_timeout=None,
    )
    return client
