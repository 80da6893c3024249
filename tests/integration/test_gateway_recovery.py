"""The scheduler dies, returns, stays away, or has nothing to serve with: what clients see."""

import asyncio

import openai
import pytest

from shared import fake_model
from shared.wire.facts import ModelFacts
from tests.fakes.gateway_world import events_of, text_of, world
from tests.fakes.scripted_scheduler import Answer, ScriptedScheduler, words
from tests.fakes.waiting import await_until


async def test_a_restarted_scheduler_gets_every_live_stream_with_its_output() -> None:
    scheduler = ScriptedScheduler(auto=False)
    async with world(scheduler) as w:
        alone = (await asyncio.gather(w.complete(max_tokens=30, seed=3), _tick_until_idle(scheduler)))[0].json()
        streamed = asyncio.create_task(w.complete(max_tokens=30, seed=3, stream=True))
        whole = asyncio.create_task(w.chat(max_tokens=20, seed=4))
        await await_until(lambda: len(scheduler.runs) == 2, 5, "both run")
        for _ in range(7):
            scheduler.tick()
        await await_until(lambda: _received(w.gateway) == [7, 7], 5, "seven tokens each arrived")
        del scheduler.submits[:]
        await scheduler.close()
        await await_until(lambda: not w.gateway.link.ready, 10, "the loss was noticed")
        assert (await w.complete()).status_code == 503
        scheduler.reopen()
        await await_until(lambda: len(scheduler.runs) == 2, 15, "both were submitted again")
        assert [len(submit.output) // 4 for submit in scheduler.submits] == [7, 7]
        scheduler.auto = True
        scheduler._keep_ticking()
        assert text_of(events_of((await streamed).text)) == alone["choices"][0]["text"]
        assert (await whole).json()["usage"]["completion_tokens"] == 20
        await w.until_idle()


def _received(gateway: object) -> list[int]:
    return [len(stream.received) for stream in gateway.streams._live.values()]


async def _tick_until_idle(scheduler: ScriptedScheduler) -> None:
    await await_until(lambda: scheduler.runs, 5, "it runs")
    while scheduler.runs:
        scheduler.tick()
        await asyncio.sleep(0)


async def test_streams_end_with_an_error_when_nothing_returns_in_time() -> None:
    scheduler = ScriptedScheduler(auto=False)
    async with world(scheduler, recovery_timeout_s=0.3) as w:
        streamed = asyncio.create_task(w.complete(max_tokens=30, stream=True))
        whole = asyncio.create_task(w.complete(max_tokens=30))
        await await_until(lambda: len(scheduler.runs) == 2, 5, "both run")
        scheduler.tick()
        scheduler.announce(ready=False, reason="no executor")
        response = await streamed
        events = events_of(response.text)
        assert "nothing could serve" in events[-2]["error"]["message"]
        assert "no executor" in events[-2]["error"]["message"]
        assert events[-1] == "[DONE]"
        assert (await whole).status_code == 503
        await w.until_idle()


async def test_a_pause_shorter_than_the_timeout_is_no_error() -> None:
    scheduler = ScriptedScheduler(auto=False)
    async with world(scheduler, recovery_timeout_s=0.3) as w:
        streamed = asyncio.create_task(w.complete(max_tokens=3, stream=True))
        await await_until(lambda: scheduler.runs, 5, "it runs")
        scheduler.announce(ready=False, reason="no executor")
        await await_until(lambda: not w.gateway.link.ready, 5, "told")
        scheduler.announce(ready=True)
        await await_until(lambda: w.gateway.link.ready, 5, "told")
        await asyncio.wait([streamed], timeout=0.5)
        assert not streamed.done()
        scheduler.auto = True
        scheduler._keep_ticking()
        assert events_of((await streamed).text)[-2]["choices"][0]["finish_reason"] == "length"


async def test_an_accepted_stream_that_is_not_taken_back_at_once_is_offered_again() -> None:
    scheduler = ScriptedScheduler(auto=False)
    async with world(scheduler) as w:
        request = asyncio.create_task(w.complete(max_tokens=3))
        await await_until(lambda: scheduler.runs, 5, "it runs")
        await scheduler.close()
        scheduler.script = lambda submit: Answer(reject=("unavailable", "no executor", 0))
        await await_until(lambda: not w.gateway.link.ready, 10, "the loss was noticed")
        del scheduler.submits[:]
        scheduler.reopen()
        await await_until(lambda: scheduler.submits, 15, "submitted again")
        scheduler.script = words
        scheduler.auto = True
        assert (await request).json()["usage"]["completion_tokens"] == 3


async def test_not_ready_is_503_with_retry_after() -> None:
    scheduler = ScriptedScheduler()
    scheduler.ready, scheduler.reason = False, "no executor has joined"
    async with world(scheduler, wait_ready=False) as w:
        await await_until(lambda: w.gateway.link.facts is not None, 5, "a session")
        ready = await w.http.get("/ready")
        assert (ready.status_code, ready.json()["reason"]) == (503, "no executor has joined")
        assert (await w.http.get("/health")).status_code == 200
        response = await w.chat()
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        with pytest.raises(openai.InternalServerError) as raised:
            await w.openai.completions.create(model="default", prompt="a")
        assert raised.value.status_code == 503
        scheduler.announce(ready=True)
        await await_until(lambda: w.gateway.link.ready, 5, "ready")
        assert (await w.http.get("/ready")).status_code == 200
        assert (await w.chat(max_tokens=1)).status_code == 200


async def test_another_tokenizer_than_the_executors_is_not_ready() -> None:
    facts = fake_model.facts()
    other = ModelFacts("other", facts.vocab_size, facts.context_len, facts.eos_token_ids, "another digest")
    async with world(ScriptedScheduler(facts=other), wait_ready=False) as w:
        await await_until(lambda: "tokenizer" in w.gateway.link.reason, 5, "the mismatch is seen")
        assert "tokenizer" in (await w.http.get("/ready")).json()["reason"]
        assert (await w.complete()).status_code == 503


@pytest.mark.parametrize(
    ("reject", "status", "retry_after"),
    [
        (("too_long", "the prompt of 100 tokens does not fit", 0), 400, None),
        (("invalid", "no", 0), 400, None),
        (("queue_full", "10 requests wait already", 2500), 429, "3"),
        (("overloaded", "the first token would come in 9000 ms", 4200), 429, "5"),
        (("unavailable", "no executor", 0), 503, "1"),
        (("duplicate", "?", 0), 500, None),
    ],
)
async def test_a_rejection_has_its_own_status(
    reject: tuple[str, str, int], status: int, retry_after: str | None
) -> None:
    async with world(ScriptedScheduler(lambda submit: Answer(reject=reject))) as w:
        for stream in (True, False):
            response = await w.complete(stream=stream, n=2)
            assert response.status_code == status
            assert response.headers.get("retry-after") == retry_after
            assert response.json()["error"]["message"] == reject[1]
        await w.until_idle()


async def test_one_rejected_choice_cancels_the_others() -> None:
    def second_only(submit: object) -> Answer:
        if submit.request_id.endswith("-1"):
            return Answer(reject=("queue_full", "full", 0))
        return Answer([300] * 10)

    scheduler = ScriptedScheduler(second_only, auto=False)
    async with world(scheduler) as w:
        assert (await w.complete(n=3)).status_code == 429
        await w.until_idle()
        assert {cancel.request_id.rsplit("-")[-1] for cancel in scheduler.cancels} == {"0", "2"}
