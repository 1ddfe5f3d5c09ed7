"""Links between real processes, over Gloo and gRPC: payloads verified, kills, relinks, violations, leaks."""

import json
import multiprocessing
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.integration.link_node import SLOT_BYTES, content, digest, run

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload([run.__module__])  # torch is imported once
Event = dict[str, Any]


class Node:
    """One process of link_node.py."""

    def __init__(self, role: str, incarnation: str, op_timeout_s: float) -> None:
        self.incarnation = incarnation
        self._ours, theirs = socket.socketpair()
        self.process = PROCESSES.Process(target=run, args=(theirs, role, incarnation, op_timeout_s))
        self.process.start()
        theirs.close()
        self._events: queue.Queue[Event] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.address = f"127.0.0.1:{self.wait('serving')['port']}" if role == "decode" else ""

    def _read(self) -> None:
        with self._ours, self._ours.makefile("r") as lines:
            for line in lines:
                self._events.put(json.loads(line))

    def do(self, command: str, **arguments: Any) -> None:
        self._ours.sendall(json.dumps({"do": command, **arguments}).encode() + b"\n")

    def wait(self, event: str, timeout_s: float = 30) -> Event:
        """The next event of this kind; others before it are skipped."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = self._events.get(timeout=max(0.01, deadline - time.monotonic()))
            if found["event"] == event:
                return found

    def close(self) -> None:
        """End in good order and say whether something was stuck."""
        self._ours.shutdown(socket.SHUT_WR)
        assert self.wait("closed", 15)["fatal"] is False
        self.process.join(15)
        assert self.process.exitcode == 0

    def kill(self) -> float:
        self.process.kill()
        killed_at = time.monotonic()
        self.process.join(5)
        return killed_at


Start = Callable[..., Node]


@pytest.fixture
def start() -> Iterator[Start]:
    nodes: list[Node] = []

    def start_one(role: str, incarnation: str, op_timeout_s: float = 3.0) -> Node:
        nodes.append(Node(role, incarnation, op_timeout_s))
        return nodes[-1]

    yield start_one
    for node in nodes:
        node.kill()


def link_up(prefill: Node, decode: Node) -> None:
    prefill.do("connect", address=decode.address, incarnation=decode.incarnation)
    prefill.do("wait_up")
    assert prefill.wait("up")["links"] == {"decode-0": decode.incarnation}


def transfer(prefill: Node, decode: Node, meta: str, seed: int, num_bytes: int = 100_000) -> None:
    """One payload arrives intact."""
    prefill.do("push", meta=meta, seed=seed, num_bytes=num_bytes, incarnation=decode.incarnation)
    landed = decode.wait("landed")
    assert (landed["meta"], landed["digest"]) == (meta, digest(content(seed, num_bytes)))
    pushed = prefill.wait("pushed")
    assert (pushed["meta"], pushed["kept"]) == (meta, True)


def rehearse_faults(prefill: Node, decode: Node) -> None:
    """A slow link still delivers; one cut in the middle of a payload loses it, at both ends, and comes back."""
    prefill.do("slow", bytes_per_s=1e6, for_s=60)
    asked_at = time.monotonic()
    transfer(prefill, decode, "slow", 6, num_bytes=200_000)
    assert time.monotonic() - asked_at >= 0.2
    for victim in (prefill, decode):
        prefill.do("slow", bytes_per_s=1, for_s=60)
        prefill.do("push", meta="cut", seed=7, num_bytes=100, incarnation=decode.incarnation)
        assert decode.wait("posted")["meta"] == "cut"
        victim.do("cut")
        assert victim.wait("cut")["links"] == 1
        assert "cut by chaos" in prefill.wait("lost")["why"]
        assert decode.wait("lost")["error"] == "LinkDown"
        prefill.do("slow", bytes_per_s=1, for_s=0)
        prefill.do("wait_up")
        prefill.wait("up")
        transfer(prefill, decode, "after the cut", 8)


def test_payloads_scrap_cancel_violations_and_faults_on_demand(start: Start) -> None:
    decode, prefill = start("decode", "d1"), start("prefill", "p1")
    link_up(prefill, decode)
    sizes = [1, 4096, SLOT_BYTES, 12345, SLOT_BYTES - 1] * 3
    for seed, num_bytes in enumerate(sizes):
        prefill.do("push", meta=f"m{seed}", seed=seed, num_bytes=num_bytes, incarnation="d1")
    for seed, num_bytes in enumerate(sizes):
        landed = decode.wait("landed")
        assert (landed["meta"], landed["digest"]) == (f"m{seed}", digest(content(seed, num_bytes)))
        assert prefill.wait("pushed")["meta"] == f"m{seed}"

    prefill.do("push", meta="scrap", seed=1, num_bytes=SLOT_BYTES, incarnation="d1")
    assert prefill.wait("pushed")["kept"] is False
    for _ in range(6):  # a cancelled wait must not cost a slot
        prefill.do("push", meta="cancelled", seed=5, num_bytes=SLOT_BYTES, incarnation="d1")
        prefill.do("cancel_last")
        assert decode.wait("landed")["digest"] == digest(content(5, SLOT_BYTES))
    transfer(prefill, decode, "after", 3)

    for num_bytes in (0, SLOT_BYTES + 1):  # the link dies of it, and neither process
        prefill.do("lie", num_bytes=num_bytes, incarnation="d1")
        lost = prefill.wait("lost")
        assert lost["error"] == "LinkDown"
        assert f"1 to {SLOT_BYTES}" in lost["why"]
        prefill.do("wait_up")
        prefill.wait("up")
        transfer(prefill, decode, "again", 4)
    rehearse_faults(prefill, decode)
    prefill.close()
    decode.close()


def test_kill_decode_in_mid_stream(start: Start) -> None:
    decode, prefill = start("decode", "d1"), start("prefill", "p1")
    decode.do("check", on=False)
    link_up(prefill, decode)
    prefill.do("flood", incarnation="d1")
    prefill.wait("flooding")
    killed_at = decode.kill()
    over = prefill.wait("flood_over")
    print(f"prefill knew after {over['time'] - killed_at:.3f} s")
    assert over["time"] - killed_at < 5.0
    assert set(over["errors"]) <= {"LinkDown"}
    prefill.do("push", meta="x", seed=1, num_bytes=1, incarnation="d1")
    assert prefill.wait("error")["error"] == "LinkDown"
    successor = start("decode", "d2")
    link_up(prefill, successor)
    transfer(prefill, successor, "again", 1)
    prefill.close()
    successor.close()


def test_kill_prefill_in_mid_stream(start: Start) -> None:
    decode, prefill = start("decode", "d1"), start("prefill", "p1")
    decode.do("check", on=False)
    link_up(prefill, decode)
    decode.do("hold", on=True)  # or a kill may come when everything has just landed
    prefill.do("flood", incarnation="d1")
    decode.wait("full")
    killed_at = prefill.kill()
    lost = decode.wait("lost")
    assert lost["error"] == "LinkDown"
    print(f"decode knew after {lost['time'] - killed_at:.3f} s")
    assert lost["time"] - killed_at < 5.0
    successor = start("prefill", "p2")
    decode.do("hold", on=False)
    decode.do("check", on=True)
    link_up(successor, decode)
    transfer(successor, decode, "again", 1)
    successor.close()
    decode.close()


def test_relinks_leak_nothing(start: Start) -> None:
    decode, prefill = start("decode", "d1", 1.0), start("prefill", "p1", 1.0)
    counts = []
    for round_ in range(23):
        link_up(prefill, decode)
        transfer(prefill, decode, f"m{round_}", round_)
        prefill.do("forget")
        if round_ in {2, 22}:  # threads of gRPC and Gloo are all there after a few
            time.sleep(1.5)
            for node in (prefill, decode):
                node.do("resources")
            counts.append([node.wait("resources") for node in (prefill, decode)])
    for before, after in zip(*counts, strict=True):
        assert after["threads"] <= before["threads"] + 1
        assert after["fds"] <= before["fds"] + 1
    prefill.close()
    decode.close()
