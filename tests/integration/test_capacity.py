"""A cluster takes as many requests as `capacity` predicts, and the next one waits in the router."""

import asyncio
from pathlib import Path

import pytest

from decode_worker.capacity import capacity
from pdserve.request import Sampling, WorkRequest
from tests.inprocess import in_process
from tests.toy import toy_engine, write_toy_model


@pytest.mark.parametrize(("num_prompt", "num_completion"), [(40, 20), (10, 200)])
async def test_filling_to_the_first_refusal(tmp_path: Path, num_prompt: int, num_completion: int) -> None:
    folder, num_pages, num_more = write_toy_model(tmp_path), 60, 3
    engines = [toy_engine(folder, num_pages=num_pages)] * 2
    predicted = capacity(engines[1].card.kv_layout, num_pages, num_prompt, num_completion).admitted
    async with in_process(engines[:1], engines[1:], chunk_tokens=4096, stepped=True) as cluster:
        (end,) = cluster.decodes
        works = [
            WorkRequest(f"r{n}", (n + 3,) * num_prompt, num_prompt, Sampling(temperature=0.0), num_completion)
            for n in range(predicted + num_more)
        ]
        tasks = [asyncio.create_task(cluster.complete(work)) for work in works]
        for _ in range(len(works) + 5):  # nobody computes: tickets are given, and none ends
            await end.step()
        assert (end.worker.num_requests, len(cluster.room)) == (predicted, num_more)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for _ in range(3):
            await end.step()
            await cluster.prefills[0].step()
        await cluster.assert_clean()
