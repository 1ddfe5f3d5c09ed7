"""Who comes, goes missing, comes back and leaves, for the person who runs `pdserve up`.

A worker is announced when it registers. From then on its beats are listened to, as routers do: it is lost when they
stop, and back when they go on or when a new incarnation registers.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable

from pdserve import rpc
from pdserve.errors import WorkerLost
from pdserve.membership import Membership, WorkerInfo
from pdserve.request import Incarnation
from router.peers import CONNECT_LIMIT_S, Heartbeat

RETRY_S = 0.5
SILENCE_LIMIT_S = 2.0  # more than routers allow: what is said here should be worth a line, on a busy machine, too


class News:
    """Of one cluster; `follow` must be running."""

    def __init__(self, members: Membership, stuck_after_s: float, say: Callable[[str], None]) -> None:
        self._members = members
        self._stuck_after_s = stuck_after_s
        self._say = say
        self._known: set[str] = set()
        self._listening: dict[Incarnation, asyncio.Task[None]] = {}

    async def follow(self, expected: set[str], complete: asyncio.Event) -> None:
        """Tell the news until cancelled; set `complete` once all expected workers have been there."""
        try:
            async for view in self._members.views():
                self._take(view)
                if expected <= self._known:
                    complete.set()
        finally:
            for task in self._listening.values():
                task.cancel()
            await asyncio.gather(*self._listening.values(), return_exceptions=True)

    def _take(self, view: tuple[WorkerInfo, ...]) -> None:
        present = {info.incarnation: info for info in view}
        for gone in self._listening.keys() - present.keys():
            self._listening.pop(gone).cancel()
        for incarnation in present.keys() - self._listening.keys():
            info = present[incarnation]
            self._say(
                f"{info.id} is {'back' if info.id in self._known else 'ready'}, pid {info.pid}, on {info.address}"
            )
            self._known.add(info.id)
            self._listening[incarnation] = asyncio.create_task(self._listen(info))

    async def _listen(self, info: WorkerInfo) -> None:
        is_lost = False
        while True:
            beats = self._beats(info)
            try:
                async for _ in beats:
                    if is_lost:
                        self._tell(info, "back")
                    is_lost = False
            except WorkerLost as error:
                if not is_lost:
                    self._say(f"lost {error}")
                is_lost = True
            finally:
                await beats.aclose()
            await asyncio.sleep(RETRY_S)  # back-off: the same incarnation may come back

    def _tell(self, info: WorkerInfo, state: str) -> None:
        self._say(f"{info.id} is {state}, pid {info.pid}, on {info.address}")

    async def _beats(self, info: WorkerInfo) -> AsyncGenerator[None, None]:
        async with rpc.channel(info.address) as channel:
            heartbeat = Heartbeat(info, channel, self._stuck_after_s)
            try:
                await heartbeat.next(CONNECT_LIMIT_S)
                while True:
                    yield
                    await heartbeat.next(SILENCE_LIMIT_S)
            finally:
                heartbeat.close()
