"""From request fields to what the scheduler gets: the choices where servers differ, as pure functions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.api.errors import ApiError
from services.gateway.api.schema import ChatRequest, CompletionRequest, StreamOptions
from services.gateway.api.settings import choice_seed, settings_of
from shared import fake_model
from shared.wire import tokens

FACTS = fake_model.facts(context_len=100)


def test_defaults() -> None:
    settings = settings_of(CompletionRequest(), FACTS, 5)
    assert (settings.n, settings.temperature, settings.top_p, settings.top_k, settings.seed) == (1, 1.0, 1.0, 0, 5)
    assert (settings.max_tokens, settings.skip_special_tokens, settings.stream) == (16, True, False)
    assert settings_of(ChatRequest(), FACTS, 5).max_tokens is None


@given(prompt_len=st.integers(1, 130), max_tokens=st.none() | st.integers(1, 300), min_tokens=st.integers(0, 300))
def test_lengths_always_fit_the_context(prompt_len: int, max_tokens: int | None, min_tokens: int) -> None:
    request = ChatRequest(max_tokens=max_tokens, min_tokens=min_tokens)
    if prompt_len >= 100 or (max_tokens is not None and min_tokens > max_tokens):
        with pytest.raises(ApiError):
            settings_of(request, FACTS, 0).submit("r", [1] * prompt_len, 0, FACTS)
        return
    submit = settings_of(request, FACTS, 0).submit("r", [1] * prompt_len, 0, FACTS)
    assert submit.max_tokens == min(100 - prompt_len, max_tokens or 1000)
    assert submit.sampling.min_tokens == min(min_tokens, submit.max_tokens)
    assert bool(submit.sampling.stop_token_ids) == (submit.sampling.min_tokens > 0)


@given(seed=st.integers(-(2**63), 2**63 - 1), choice=st.integers(0, 127))
def test_seeds_fit_the_wire(seed: int, choice: int) -> None:
    settings = settings_of(CompletionRequest(seed=seed), FACTS, 77)
    assert 0 <= settings.submit("r", [1], choice, FACTS).sampling.seed < 2**63
    if seed == -1:
        assert settings.seed == 77


def test_choice_seeds_are_fixed_for_ever() -> None:
    assert [choice_seed(42, choice) for choice in range(3)] == [42, 7016334855160412195, 8425859469485637127]


def test_usage_options_and_stops() -> None:
    options = StreamOptions(include_usage=True)
    settings = settings_of(CompletionRequest(stream=True, stream_options=options, stop="x"), FACTS, 0)
    assert (settings.include_usage, settings.continuous_usage, settings.stops) == (True, False, ("x",))


def test_stop_token_ids_are_checked_and_masked_with_eos() -> None:
    with pytest.raises(ApiError):
        settings_of(CompletionRequest(stop_token_ids=[fake_model.VOCAB_SIZE]), FACTS, 0)
    settings = settings_of(CompletionRequest(stop_token_ids=[3], min_tokens=1), FACTS, 0)
    submit = settings.submit("r", [1], 0, FACTS)
    assert tokens.unpack(submit.sampling.stop_token_ids) == [3, *fake_model.EOS_TOKEN_IDS]
    assert tokens.unpack(submit.stop_token_ids) == [3]
