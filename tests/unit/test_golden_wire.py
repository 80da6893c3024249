"""W3: the bytes of every message stay what they are.

When a test here fails because a field was appended (with a default), add the new bytes to the message's list in
``tests/data/golden_wire.json``, *after* the old ones: every line must decode for ever, the last is today's encoding.
Anything else (a field removed, moved, or changed in type) breaks running peers: it needs a new ``PROTOCOL``.
"""

import json
from pathlib import Path

import msgspec
import pytest

from shared.wire import codec
from tests.fakes.wire_messages import DECODERS, SAMPLES, all_messages, messages_of

GOLDEN: dict[str, list[str]] = json.loads((Path(__file__).parents[1] / "data" / "golden_wire.json").read_text())


def test_every_message_has_a_sample_and_golden_bytes() -> None:
    names = [kind.__name__ for kind in all_messages()]
    assert sorted(type(sample).__name__ for sample in SAMPLES) == sorted(names)
    assert sorted(GOLDEN) == sorted(names)


def test_samples_set_every_field_to_something_that_is_not_its_default() -> None:
    for sample in SAMPLES:
        for field in msgspec.structs.fields(sample):
            if field.name not in {"protocol", "reason"}:
                assert getattr(sample, field.name) != field.default, f"{type(sample).__name__}.{field.name}"


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)
def test_w3_a_message_encodes_to_its_golden_bytes(sample: msgspec.Struct) -> None:
    assert codec.encode(sample).hex() == GOLDEN[type(sample).__name__][-1]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)
def test_w3_golden_bytes_decode(sample: msgspec.Struct) -> None:
    *older, last = GOLDEN[type(sample).__name__]
    for direction, (decoder, _) in DECODERS.items():
        if type(sample) in messages_of(direction):
            assert decoder.decode(bytes.fromhex(last)) == sample
            assert all(isinstance(decoder.decode(bytes.fromhex(line)), type(sample)) for line in older)
