"""The client of peers, against a small server that speaks OpenAI's streamed completions."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from benchmarks.peer import LOAD, Endpoint, Timed, ask, closed_loop, rate, steady_rate


@contextmanager
def peer(missing: int = 0) -> Iterator[tuple[Endpoint, list[dict[str, object]]]]:
    """A server whose answers lack `missing` tokens, and the requests that it got."""
    got: list[dict[str, object]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            got.append({"path": self.path, **body})
            self.send_response(200)
            self.end_headers()
            num_tokens = body["max_tokens"] - missing
            events: list[dict[str, object]] = [{"choices": [{"text": "x"}]}] * num_tokens
            events.append({"choices": [], "usage": {"completion_tokens": num_tokens}})
            for event in events:
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *_: object) -> None:
            """Nothing: tests are silent."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield Endpoint(f"http://127.0.0.1:{server.server_port}/v1", "toy"), got
        finally:
            server.shutdown()
            thread.join()


def test_an_answer_is_asked_for_in_full_and_timed_by_its_tokens() -> None:
    with peer() as (endpoint, got):
        answer = ask(endpoint, 20, 5)
    assert (len(answer.events_s), answer.num_tokens) == (5, 5)
    (body,) = got
    assert (body["path"], body["model"], body["max_tokens"]) == ("/v1/completions", "toy", 5)
    assert (body["temperature"], body["ignore_eos"], body["stream"]) == (0, True, True)
    assert isinstance(body["prompt"], list)
    assert len(body["prompt"]) == 20


def test_a_server_that_stops_early_is_not_measured() -> None:
    with peer(missing=1) as (endpoint, _), pytest.raises(SystemExit, match="ignore_eos"):
        ask(endpoint, 20, 5)


def test_a_loop_sends_every_request_and_no_prompt_twice() -> None:
    with peer() as (endpoint, got):
        answers = closed_loop(endpoint, 3, 2)
    assert len(answers) == 6
    assert {each.num_tokens for each in answers} == {LOAD[1]}
    assert len({str(body["prompt"]) for body in got}) == 6


def test_rates_of_a_known_loop() -> None:
    """Two clients; the first request of each ends at 4 and 5, the last one starts at 5: one token each between."""
    answers = [
        Timed(0, [1, 2, 3, 4], 4),
        Timed(0, [2, 3, 4, 5], 4),
        Timed(4, [5, 6, 7, 8], 4),
        Timed(5, [6, 7, 8, 9], 4),
    ]
    assert rate(answers) == pytest.approx(16 / 9)
    assert steady_rate(answers) == pytest.approx(2)  # one of the second request, one of the third


def test_an_event_may_carry_several_tokens() -> None:
    assert Timed(0, [1, 2, 3], 6).tokens_between(1, 3) == pytest.approx(4)
