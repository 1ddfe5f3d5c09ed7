"""What must hold: of the answers, and of the cluster once everybody is through."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence

from pdserve.errors import Unavailable
from tests.chaos.simulation.client import Client
from tests.chaos.simulation.cluster import Cluster
from tests.chaos.simulation.nodes import DecodeNode, PrefillNode, WorkerNode
from tests.chaos.simulation.virtual_loop import Host

MOST_S = 45.0  # of a request, whatever happens
Census = dict[str, Counter[str]]


def wrong_answers(clients: Sequence[Client], *, may_fail: bool = False) -> Iterator[str]:
    """Every token that is not what it should be, and every request that should not have failed."""
    for client in clients:
        name, expected = f"job {client.job.number}", list(client.job.answer)
        if client.received != expected[: len(client.received)]:
            yield f"{name}: got {_brief(client.received)}, expected {_brief(expected)}"
        if client.error is not None and may_fail and type(client.error) is Unavailable:
            pass
        elif client.error is not None:
            yield f"{name} failed: {type(client.error).__name__}: {client.error}"
        elif not client.has_left and len(client.received) != len(expected):
            yield f"{name}: {len(client.received)} of {len(expected)} tokens"
        if client.ended_at is None or client.ended_at - client.job.at_s > MOST_S:
            yield f"{name} took until {client.ended_at}"


def _brief(tokens: Sequence[object]) -> str:
    return str([(getattr(token, "number", 0), getattr(token, "token_id", 0)) for token in tokens])


def census(cluster: Cluster) -> Census:
    """Tasks per kind of host, at rest."""
    return {_kind(host): _tasks(host) for host in cluster.hosts()}


def _kind(host: Host) -> str:
    return host.name.partition("-")[0]


def _tasks(host: Host) -> Counter[str]:
    return Counter(getattr(task.get_coro(), "__qualname__", "?") for task in host.tasks)


def leftovers(cluster: Cluster, at_rest: Census) -> list[str]:
    """All that is not as in a cluster that has just started and done nothing."""
    found = [problem for node in cluster.workers.values() for problem in _of_worker(cluster, node)]
    for name, router in cluster.routers.items():
        pipeline = router.pipeline
        if len(router.room) or pipeline.num_running:
            found.append(f"{name}: {len(router.room)} wait, {pipeline.num_running} run")
        peers = [*router.directory.prefills, *router.directory.decodes]
        if len(peers) != len(cluster.workers):
            found.append(f"{name} knows {len(peers)} workers of {len(cluster.workers)}")
        found += [
            f"{name} counts {peer.client} as busy" for peer in router.directory.decodes if peer.client.num_tickets
        ]
        found += [
            f"{name}: {p.client.queued.num_tokens} queued"
            for p in router.directory.prefills
            if p.client.queued.num_tokens
        ]
    for host in cluster.hosts():
        if (now := _tasks(host)) != at_rest[_kind(host)]:
            found.append(f"{host.name}: tasks {_difference(now, at_rest[_kind(host)])}")
    if cluster.wires.num_open > cluster.shape.prefills * cluster.shape.decodes:  # an idle one may be dead, unnoticed
        found.append(f"{cluster.wires.num_open} wires")
    return found


def _difference(now: Counter[str], then: Counter[str]) -> str:
    return f"too many {dict(now - then)}, missing {dict(then - now)}"


def _of_worker(cluster: Cluster, node: WorkerNode) -> Iterator[str]:
    name, counts, ledger = node.host.name, node.worker.page_counts(), node.worker.ledger()
    if counts.in_use or counts.promised or ledger.entries or node.worker.num_requests:
        yield f"{name}: {counts}, {ledger.entries}"
    yield from (f"{name}: {problem}" for problem in ledger.problems)
    num_links = cluster.shape.decodes if isinstance(node, PrefillNode) else cluster.shape.prefills
    if (num_at_rest := node.links_at_rest()) != num_links:
        yield f"{name}: {num_at_rest} of {num_links} links are up and have all their slots"
    if isinstance(node, DecodeNode) and node.receiver._offers:
        yield f"{name}: remembers offers of {sorted(node.receiver._offers)}"


async def until_clean(cluster: Cluster, at_rest: Census, limit_s: float) -> list[str]:
    """Wait until nothing is left, at most `limit_s`; returns what is."""
    loop = asyncio.get_running_loop()
    due = loop.time() + limit_s
    while (found := leftovers(cluster, at_rest)) and loop.time() < due:
        await asyncio.sleep(0.5)  # of virtual time, until all is at rest
    return found
