"""The registry against a real server: joins, leaves, replacements, and a Redis that is killed and comes back empty."""

import asyncio
import dataclasses
import json
import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest
import redis

from cluster import registry
from cluster.redis_server import RedisServer
from cluster.registry import Registration, RegistryMembership, from_json, merged, to_json
from pdserve.membership import WorkerInfo
from pdserve.model_card import KvLayout, ModelCard
from pdserve.request import Incarnation, WorkerId

CARD = ModelCard("toy", 512, 256, (1, 2), "f00d", KvLayout(2, 1, 8, 16, "float32", "v1"), exact=True)
View = tuple[WorkerInfo, ...]


def worker(id: str, incarnation: str = "one") -> WorkerInfo:
    role = "prefill" if id.startswith("prefill") else "decode"
    return WorkerInfo(WorkerId(id), role, Incarnation(incarnation), "127.0.0.1:5", 42, CARD)  # type: ignore[arg-type]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    running = RedisServer(tmp_path)
    yield running
    running.stop()


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "PERIOD_S", 0.1)
    monkeypatch.setattr(registry, "LOOK_S", 0.1)
    monkeypatch.setattr(registry, "BACKOFF_S", (0.02, 0.1))


async def following(views: AsyncGenerator[View, None]) -> View:
    async with asyncio.timeout(10):
        return await anext(views)


async def nothing_for(views: AsyncGenerator[View, None], seconds: float) -> "asyncio.Task[View]":
    """Wait so long for a change that must not come; the task goes on waiting for it."""
    task = asyncio.ensure_future(following(views))
    done, _ = await asyncio.wait([task], timeout=seconds)
    assert not done, f"the view changed: {task}"
    return task


async def undisturbed(views: AsyncGenerator[View, None]) -> None:
    task = await nothing_for(views, 0.5)
    task.cancel()
    await asyncio.wait([task])


async def test_members_come_and_go(server: RedisServer) -> None:
    async with aclosing(RegistryMembership(server.url, "a").views()) as views:
        assert await following(views) == ()
        async with Registration(server.url, "a", worker("prefill-0")):
            assert await following(views) == (worker("prefill-0"),)
            async with Registration(server.url, "a", worker("decode-0")):
                assert await following(views) == (worker("decode-0"), worker("prefill-0"))
            assert await following(views) == (worker("prefill-0"),)
        assert await following(views) == ()


async def test_a_change_is_announced_not_polled(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "LOOK_S", 60.0)
    async with aclosing(RegistryMembership(server.url, "a").views()) as views:
        await following(views)
        async with Registration(server.url, "a", worker("decode-0")):
            assert await following(views) == (worker("decode-0"),)
        assert await following(views) == ()


async def test_namespaces_do_not_meet(server: RedisServer) -> None:
    async with (
        Registration(server.url, "a", worker("decode-0")),
        aclosing(RegistryMembership(server.url, "b").views()) as views,
    ):
        assert await following(views) == ()
        await undisturbed(views)


async def test_a_new_incarnation_replaces_and_the_old_one_cannot_take_it_away(server: RedisServer) -> None:
    old, new = worker("decode-0", "one"), worker("decode-0", "two")
    async with aclosing(RegistryMembership(server.url, "a").views()) as views:
        assert await following(views) == ()
        async with Registration(server.url, "a", old) as first:
            assert await following(views) == (old,)
            assert first._task
            first._task.cancel()  # as if killed: it no longer registers
            async with Registration(server.url, "a", new):
                assert await following(views) == (new,)
                await first._leave()  # the old one's late good-bye
                await undisturbed(views)


async def test_a_vanished_record_changes_nothing(server: RedisServer) -> None:
    async with aclosing(RegistryMembership(server.url, "a").views()) as views:
        await following(views)
        async with Registration(server.url, "a", worker("decode-0")) as registration:
            await following(views)
            assert registration._task
            registration._task.cancel()
            with redis.Redis.from_url(server.url) as client:
                client.flushall()
            await undisturbed(views)


async def test_a_killed_redis_that_comes_back_empty(
    tmp_path: Path, server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cluster.registry")
    async with (
        aclosing(RegistryMembership(server.url, "a").views()) as views,
        Registration(server.url, "a", worker("prefill-0")),
    ):
        while await following(views) != (worker("prefill-0"),):
            pass
        server.process.kill()
        server.process.wait()
        change = await nothing_for(views, 0.5)  # gone: the last view stands
        async with asyncio.timeout(20):
            while caplog.text.count("Redis is away") < 2:
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        assert caplog.text.count("Redis is away") == 2  # the worker said it once, the router once
        assert not change.done()

        again = RedisServer(tmp_path)  # the same address, and empty
        try:
            async with Registration(server.url, "a", worker("decode-0")), asyncio.timeout(10):
                assert await change == (worker("decode-0"), worker("prefill-0"))
            async with aclosing(RegistryMembership(server.url, "a").views()) as fresh:
                while worker("prefill-0") not in await following(fresh):  # it registers again by itself
                    pass
        finally:
            again.stop()


async def test_a_registration_outlives_a_redis_that_is_away_from_the_start(tmp_path: Path) -> None:
    async with Registration(f"unix://{tmp_path}/redis.sock", "a", worker("decode-0")) as registration:
        await asyncio.sleep(0.1)
        assert registration._task
        assert not registration._task.done()


def test_records_cross_as_json_and_nothing_else_does() -> None:
    assert from_json(to_json(worker("decode-0"))) == worker("decode-0")
    plain = json.loads(to_json(worker("decode-0")))
    plain["card"]["kv_layout"]["heads"] = 3
    with pytest.raises(ValueError, match=r"card.kv_layout: unknown key 'heads'; allowed: num_layers"):
        from_json(json.dumps(plain))


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"id": "decode-0"}', to_json(worker("decode-1"))])
def test_a_bad_record_is_skipped(text: str, caplog: pytest.LogCaptureFixture) -> None:
    view = (worker("prefill-0"),)
    assert merged(view, {"decode-0": text, "prefill-0": to_json(worker("prefill-0", "two"))}) == (
        dataclasses.replace(view[0], incarnation=Incarnation("two")),
    )
    assert "record of decode-0 is not ours" in caplog.text
