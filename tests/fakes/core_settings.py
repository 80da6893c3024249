"""Settings of the scheduler that make much happen in a tiny world: what property tests draw."""

import hypothesis.strategies as st

from services.scheduler.core.limits import Settings

core_settings = st.builds(
    Settings,
    max_inflight=st.sampled_from([1, 2]),
    max_step_tokens=st.sampled_from([None, 2, 4]),
    step_time_budget_ms=st.sampled_from([1, 5, 100]),
    prefix_cache=st.sampled_from([True, True, False]),
    policy=st.sampled_from(["continuous", "continuous", "prefill-first", "static"]),
    static_batch_size=st.integers(1, 4),
    ageing_ms=st.sampled_from([1, 100]),
    max_queue=st.sampled_from([None, None, 5]),
    max_queue_tokens=st.sampled_from([None, None, 60]),
    ttft_limit_ms=st.sampled_from([None, None, 30]),
    recovery_timeout_ms=st.just(500),
    step_timeout_ms=st.just(200),
    tenant_weights=st.just({"other": 2.0}),
)
