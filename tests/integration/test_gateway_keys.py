"""API keys: what needs one, and what of a key goes with its requests."""

from shared.api_keys import ApiKey, plain_key
from shared.wire.gateway import TenantLimits
from tests.fakes.gateway_world import world
from tests.fakes.scripted_scheduler import Answer, ScriptedScheduler


async def test_without_the_key_only_health_and_ready_answer() -> None:
    async with world(ScriptedScheduler(), api_keys=("sk-one", "sk-two"), debug_endpoints=True) as w:
        for path in ("/health", "/ready"):
            assert (await w.http.get(path)).status_code == 200
        for path in ("/metrics", "/v1/models", "/v1/models/default", "/debug/state", "/nothing"):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "sk-one"}, {"api-key": "sk-one"}):
                response = await w.http.get(path, headers=headers)
                assert response.status_code == 401
                assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert (await w.complete()).status_code == 401
        for key in ("sk-one", "sk-two"):
            headers = {"Authorization": f"Bearer {key}"}
            assert (await w.http.get("/v1/models", headers=headers)).status_code == 200
        assert not w.scheduler.submits


async def test_each_key_is_a_tenant_of_its_own_and_no_key_reaches_the_scheduler() -> None:
    """Tenants share no prefix; ``cache_salt`` divides one tenant's further."""
    async with world(ScriptedScheduler(), api_keys=("sk-one", "sk-two")) as w:
        for key, fields in (("sk-one", {}), ("sk-two", {}), ("sk-one", {"cache_salt": "pepper"})):
            headers = {"Authorization": f"Bearer {key}"}
            body = {"prompt": "hello", "max_tokens": 1, **fields}
            assert (await w.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
        one, two, salted = w.scheduler.submits
        assert one.tenant == salted.tenant != two.tenant
        assert "" not in {one.tenant, two.tenant}
        assert "sk-" not in one.tenant + two.tenant
        assert (one.salt, two.salt, salted.salt) == ("", "", "pepper")


async def test_a_named_keys_tenant_and_limits_go_with_each_request() -> None:
    limits = TenantLimits(2.0, 60, 5000, 3)
    ann = ApiKey(plain_key("sk-ann").digest, "ann", limits)
    headers = {"Authorization": "Bearer sk-ann"}
    async with world(ScriptedScheduler(), api_keys=(ann, "sk-two")) as w:
        for n, status in ((3, 200), (4, 400)):
            body = {"prompt": "hello", "max_tokens": 1, "n": n}
            response = await w.http.post("/v1/completions", json=body, headers=headers)
            assert response.status_code == status
        assert response.json()["error"]["param"] == "n", "no later time would be better"
        two = {"Authorization": "Bearer sk-two"}
        await w.http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 1}, headers=two)
        told = [(submit.tenant, submit.limits) for submit in w.scheduler.submits]
        assert told == [("ann", limits)] * 3 + [(told[-1][0], None)]


async def test_choices_whose_prompts_are_more_than_a_minutes_tokens_are_400() -> None:
    """The scheduler would take the first of them and turn the others away, whenever they come."""
    ann = ApiKey(plain_key("sk-ann").digest, "ann", TenantLimits(tokens_per_minute=10))
    headers = {"Authorization": "Bearer sk-ann"}
    async with world(ScriptedScheduler(), api_keys=(ann,)) as w:
        for prompt, n, status in (
            ("hello", 2, 200),
            ("hello", 3, 400),
            (["hello!", "hello"], 1, 400),
            ("h" * 11, 1, 200),
        ):
            body = {"prompt": prompt, "max_tokens": 1, "n": n}
            response = await w.http.post("/v1/completions", json=body, headers=headers)
            assert response.status_code == status, (prompt, n)
        assert len(w.scheduler.submits) == 3


async def test_a_request_above_its_keys_limits_is_429_before_the_first_byte() -> None:
    refusal = Answer(reject=("rate_limited", "the limit of 60 requests a minute is reached", 12_345))
    async with world(ScriptedScheduler(lambda submit: refusal)) as w:
        for stream in (False, True):
            response = await w.chat(stream=stream)
            assert (response.status_code, response.headers["retry-after"]) == (429, "13")
            assert response.json()["error"]["code"] == "rate_limited"
            assert response.json()["error"]["type"] == "rate_limit_error"
