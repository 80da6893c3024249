"""What schemathesis makes of the description: requests as described and just beside it, and answers held against it.

Not asked: that whatever fits the schema is served, as a schema cannot say how fields bound each other, nor how large
the model is.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import schemathesis
from hypothesis import given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi import checks

from services.gateway.openapi.description import describe
from services.gateway.openapi.operations import OPERATIONS, Operation
from tests.e2e.system import System
from tests.fakes.answers import named_events
from tests.fakes.gateway_world import events_of

KEY = "sk-conformance"
OF = {(operation.method, operation.path): operation for operation in OPERATIONS}


@pytest.fixture(scope="module", name="system")
def _system() -> Iterator[System]:
    """Keys are asked for; answers are short, whatever is asked for. All is given back in the end."""
    system = System(api_key=KEY, max_model_len=256)
    try:
        yield system.start()
        system.wait_idle()
        system.stop()
    finally:
        system.close()


@schemathesis.check
def no_server_error(ctx: Any, response: Any, case: Any) -> None:
    """Never a 5xx, but for a deadline that the request itself names."""
    names_a_deadline = isinstance(case.body, dict) and case.body.get("deadline_ms")
    assert response.status_code < 500 or (response.status_code == 504 and names_a_deadline), response.text


@schemathesis.check
def events_are_as_described(ctx: Any, response: Any, case: Any) -> None:
    """A stream's names and data; it ends as it should."""
    if not response.headers["content-type"][0].startswith("text/event-stream"):
        return
    if response.stream_cut_short:
        return  # by schemathesis: a stream is longer than it reads
    operation = OF[case.method.lower(), case.operation.path]
    if operation.event_names:
        assert {name for name, _ in named_events(response.text)} <= {*operation.event_names}
        return
    *chunks, last = events_of(response.text)
    assert last == "[DONE]"
    for chunk in chunks:
        msgspec.convert(chunk, operation.error if "error" in chunk else operation.chunk)


CHECKS = [
    no_server_error,
    events_are_as_described,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    checks.unsupported_method,
]


def check(operation: Operation, system: System, num_requests: int) -> None:
    """Requests to it with a key are answered as described; without one they are not even read."""
    described = schemathesis.openapi.from_dict(describe(needs_key=True))[operation.path][operation.method.upper()]
    modes = [*GenerationMode] if operation.request is not None else [GenerationMode.POSITIVE]

    @settings(max_examples=num_requests)
    @given(st.one_of([described.as_strategy(generation_mode=mode) for mode in modes]))
    def conforms(case: Any) -> None:
        case.call_and_validate(base_url=system.base_url, headers={"x-api-key": KEY}, timeout=60, checks=CHECKS)
        refused = case.call(base_url=system.base_url, headers={"x-api-key": "none"}, timeout=60)
        assert operation.is_open or refused.status_code == 401, refused.text

    conforms()


def path_of(operation: Operation) -> str:
    return operation.path


@pytest.mark.parametrize("operation", OPERATIONS, ids=path_of)
def test_answers_are_as_described(operation: Operation, system: System) -> None:
    check(operation, system, 15 if operation.request is not None else 2)


@pytest.mark.soak
@pytest.mark.parametrize("operation", OPERATIONS, ids=path_of)
def test_many_answers_are_as_described(operation: Operation, system: System) -> None:
    check(operation, system, 1000)
