"""docs/protocol.md names every struct and field of the wire, in order, with its type and default; nothing else."""

import inspect
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared.net import session as net_session
from shared.wire import executor, facts, gateway, logprobs, sampling, session
from tests.fakes.wire_messages import DECODERS, messages_of

DOC = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
MODULES = (gateway, executor, facts, logprobs, sampling, session)
STRUCTS: dict[str, type[msgspec.Struct]] = {
    name: kind
    for module in MODULES
    for name, kind in inspect.getmembers(module, inspect.isclass)
    if issubclass(kind, msgspec.Struct) and kind.__module__.startswith("shared.wire")
}
Row = tuple[str, str, str]


def _sections() -> dict[str, tuple[str, list[Row]]]:
    """By struct: the text below its heading, and the rows (field, type, default) of its table."""
    found: dict[str, tuple[str, list[Row]]] = {}
    for part in re.split(r"^### ", DOC, flags=re.MULTILINE)[1:]:
        heading, _, text = part.partition("\n")
        name = re.fullmatch(r"`(\w+)`", heading)
        if name:
            rows = re.findall(r"^\| `(\w+)` \| ([^|]+?) \| ([^|]*?) \| [^|]+ \|$", text, flags=re.MULTILINE)
            found[name[1]] = (text, rows)
    return found


def _type_text(info: Any) -> str:
    kinds = msgspec.inspect
    match info:
        case kinds.BytesType():
            return "column"
        case kinds.IntType(gt=None, ge=0, lt=4294967296):
            return "u32"
        case kinds.IntType(gt=gt, ge=ge):
            return "int > 0" if gt == 0 else "int >= 1" if ge == 1 else "int >= 0" if ge == 0 else "int"
        case kinds.StrType():
            return "text"
        case kinds.BoolType():
            return "bool"
        case kinds.FloatType():
            return "float"
        case kinds.NoneType():
            return "nil"
        case kinds.LiteralType(values=values):
            return "one of " + ", ".join(f"`{value}`" for value in values)
        case kinds.ListType(item_type=item):
            return f"list of {_type_text(item)}"
        case kinds.StructType(cls=cls):
            return f"`{cls.__name__}`"
        case kinds.UnionType(types=types):
            return " or ".join(sorted(map(_type_text, types), key=lambda text: text == "nil"))
    raise AssertionError(f"no words for {info}")


def _default_text(field: msgspec.structs.FieldInfo) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        return "empty"
    if field.default is msgspec.NODEFAULT:
        return ""
    return {"": "empty", b"": "empty", None: "nil", True: "true", False: "false"}.get(
        field.default if not isinstance(field.default, int | float) or isinstance(field.default, bool) else "number",
        f"{field.default}",
    )


def _rows_of(kind: type[msgspec.Struct]) -> list[Row]:
    types = {field.name: field.type for field in msgspec.inspect.type_info(kind).fields}
    return [(field.name, _type_text(types[field.name]), _default_text(field)) for field in msgspec.structs.fields(kind)]


def test_every_struct_has_a_section_and_every_section_a_struct() -> None:
    assert sorted(_sections()) == sorted(STRUCTS)


@pytest.mark.parametrize("name", sorted(STRUCTS))
def test_a_sections_table_is_the_structs_fields(name: str) -> None:
    text, rows = _sections()[name]
    assert rows == _rows_of(STRUCTS[name])
    assert len(re.findall(r"^\| `", text, flags=re.MULTILINE)) == len(rows), "a row that could not be read"


@pytest.mark.parametrize("name", sorted(STRUCTS))
def test_a_messages_section_says_its_tag_and_its_directions(name: str) -> None:
    text, _ = _sections()[name]
    tag = STRUCTS[name].__struct_config__.tag
    directions = {
        "gateway -> scheduler": "gateway_to_scheduler",
        "scheduler -> gateway": "scheduler_to_gateway",
        "executor -> scheduler": "executor_to_scheduler",
        "scheduler -> executor": "scheduler_to_executor",
    }
    said = {key for words, key in directions.items() if words in text.strip().split("\n\n")[0]}
    assert said == {key for key in DECODERS if STRUCTS[name] in messages_of(key)}
    assert (f"`{tag}`" in text.strip().split("\n\n")[0]) == (tag is not None)


def test_the_numbers_in_the_document_are_those_in_the_code() -> None:
    assert f"`PROTOCOL` is {session.PROTOCOL}" in DOC
    assert f"every {net_session.INTERVAL_S:g} s" in DOC
    assert f"after {net_session.TIMEOUT_S:g} s of silence" in DOC
    for reason in net_session.REASONS:
        assert f"`{reason}`" in DOC
