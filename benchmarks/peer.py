"""The load of `make bench` against any server that speaks OpenAI's completions: what a peer does on the same machine.

    python -m benchmarks.peer --url http://127.0.0.1:8000/v1 --model smollm2 [--concurrency 1 8 16] [--out FILE.json]

Prompts are random token ids, never the same twice; answers are greedy, streamed, and run to their last token. A wave is
`concurrency` requests sent at once, prefill included; a loop sends each client's next request when its last one ends,
four per client. A loop gives two rates: over the whole of it, and steady, between the first end and the last start.
Nothing here is pdserve's, nor outside the standard library, so it runs in the peer's environment as well.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import Request, urlopen

LOAD = (256, 128)  # tokens of prompt and completion where throughput is measured
SHORT = (128, 64)  # and where TPOT is
VOCABULARY = range(100, 40_000)
PER_CLIENT = 4  # as in `make bench`
REQUEST_LIMIT_S = 300.0


@dataclass(frozen=True)
class Endpoint:
    """Where to send requests, and for which model."""

    url: str
    model: str


@dataclass(frozen=True)
class Timed:
    """One answer: when it was asked for, when each event with text came, and how many tokens it had."""

    began_s: float
    events_s: list[float]
    num_tokens: int

    @property
    def ttft_s(self) -> float:
        """Seconds to the first event."""
        return self.events_s[0] - self.began_s

    @property
    def tpot_s(self) -> float:
        """Seconds per token after the first."""
        return (self.events_s[-1] - self.events_s[0]) / (self.num_tokens - 1)

    def tokens_between(self, since_s: float, until_s: float) -> float:
        """Tokens that came then; an event stands for its share of them, as texts of two tokens may share one."""
        inside = sum(since_s < at <= until_s for at in self.events_s)
        return inside * self.num_tokens / len(self.events_s)


def ask(endpoint: Endpoint, num_prompt: int, num_output: int) -> Timed:
    """Send one request and time its events."""
    body = {
        "model": endpoint.model,
        "prompt": random.choices(VOCABULARY, k=num_prompt),
        "max_tokens": num_output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"content-type": "application/json"}
    request = Request(f"{endpoint.url}/completions", json.dumps(body).encode(), headers)
    began_s, events_s, num_tokens = time.perf_counter(), [], 0
    with urlopen(request, timeout=REQUEST_LIMIT_S) as response:
        for line in response:
            at = time.perf_counter()
            event = _event(line)
            if event.get("choices"):
                events_s.append(at)
            num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
    if num_tokens != num_output:
        raise SystemExit(f"{num_tokens} tokens came instead of {num_output}: does the server obey ignore_eos?")
    return Timed(began_s, events_s, num_tokens)


def _event(line: bytes) -> dict[str, Any]:
    """The JSON of a server-sent event; empty between events and at the stream's end."""
    payload = line.removeprefix(b"data:").strip()
    event: dict[str, Any] = json.loads(payload) if payload.startswith(b"{") else {}
    return event


def closed_loop(endpoint: Endpoint, concurrency: int, per_client: int) -> list[Timed]:
    """`per_client` requests by each of `concurrency` clients; whoever is free sends the next one."""
    with ThreadPoolExecutor(concurrency) as clients:
        asked = [clients.submit(ask, endpoint, *LOAD) for _ in range(concurrency * per_client)]
        return [each.result() for each in asked]


def rate(answers: Sequence[Timed]) -> float:
    """Output tokens per second, from the first start to the last end."""
    took_s = max(each.events_s[-1] for each in answers) - min(each.began_s for each in answers)
    return sum(each.num_tokens for each in answers) / took_s


def steady_rate(answers: Sequence[Timed]) -> float:
    """Output tokens per second while every client was busy and not all had just begun."""
    since_s, until_s = min(each.events_s[-1] for each in answers), max(each.began_s for each in answers)
    return sum(each.tokens_between(since_s, until_s) for each in answers) / (until_s - since_s)


def ttft_ms(endpoint: Endpoint, num_prompt: int) -> float:
    """Milliseconds to the first token, with nobody else there."""
    return 1000 * ask(endpoint, num_prompt, 2).ttft_s


def measure(endpoint: Endpoint, concurrencies: Sequence[int]) -> Iterator[tuple[str, list[float]]]:
    """Every figure's name and values, one after the other, after one request that warms the server up."""
    ask(endpoint, *LOAD)
    for num_prompt in (512, 2000):
        yield f"TTFT {num_prompt} tokens, ms", [ttft_ms(endpoint, num_prompt) for _ in range(3)]
    yield "TPOT, ms", [1000 * ask(endpoint, *SHORT).tpot_s for _ in range(3)]
    for c in concurrencies:
        yield f"wave at {c}, tokens/s", [rate(closed_loop(endpoint, c, 1)) for _ in range(3)]
        loop = closed_loop(endpoint, c, PER_CLIENT)
        yield f"loop at {c}, tokens/s", [rate(loop)]
        yield f"steady at {c}, tokens/s", [steady_rate(loop)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 8, 16])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found = {}
    for name, values in measure(Endpoint(arguments.url, arguments.model), arguments.concurrency):
        found[name] = values
        print(f"| {name} | {median(values):.1f} [{min(values):.1f}..{max(values):.1f}] |", flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
