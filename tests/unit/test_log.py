"""One readable line per record."""

import json
import logging
import re
from collections.abc import Iterator

import pytest

from shared import log


@pytest.fixture(autouse=True)
def _root_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_a_record_is_one_line_with_time_level_process_and_logger(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("100%-1", "info")
    logging.getLogger("shared.net").warning("refused %s", "x")
    logging.getLogger("shared.net").debug("unseen")
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} WARNING 100%-1 shared\.net: refused x\n", capsys.readouterr().err)


def test_each_record_has_its_own_time(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("a", "info")
    (handler,) = logging.getLogger().handlers
    for created in (10.25, 10.5, 11.75, 70.0):
        record = logging.makeLogRecord(
            {"msg": "", "name": "x", "levelno": logging.INFO, "created": created, "msecs": created % 1 * 1000}
        )
        handler.handle(record)
    times = [line.split()[0][-9:] for line in capsys.readouterr().err.splitlines()]
    assert times == ["00:10.250", "00:10.500", "00:11.750", "01:10.000"]


def test_setting_up_twice_does_not_double_the_lines(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("a", "info")
    log.setup("b", "info")
    logging.getLogger().info("once")
    assert capsys.readouterr().err.count("once") == 1


def test_an_unknown_level_is_the_users_mistake() -> None:
    with pytest.raises(ValueError, match="loud"):
        log.setup("a", "loud")


def test_a_peers_text_began_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("a", "info")
    logging.getLogger().warning("failed: %s", "x\n12:00:00.000 INFO a: all is well\x1b[2J\x9b1m")
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert line[:-1].isprintable()


def test_json_is_one_object_a_record_with_the_fields_it_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("a", "info", "json")
    logging.getLogger("x").info("took %d\nms", 5, extra={log.FIELDS: {"duration_ms": 5}})
    try:
        raise ValueError("no")
    except ValueError:
        logging.getLogger("x").exception("broke")
    told, broke = map(json.loads, capsys.readouterr().err.splitlines())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", told.pop("time"))
    assert told == {"level": "info", "process": "a", "logger": "x", "message": "took 5\nms", "duration_ms": 5}
    assert broke["exception"].endswith("ValueError: no")


def test_an_unknown_format_is_the_users_mistake() -> None:
    with pytest.raises(ValueError, match="xml"):
        log.setup("a", "info", "xml")


def test_ops_47_a_warning_that_repeats_is_counted_and_told_later(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log.setup("a", "info")
    for number in range(100):
        logging.getLogger("x").warning("refused %d", number)
        logging.getLogger("y").info("served %d", number)
    logging.getLogger("x").warning("something else")
    lines = capsys.readouterr().err.splitlines()
    assert sum("refused" in line for line in lines) == log.REPEATS
    assert sum("served" in line for line in lines) == 100
    assert "something else" in lines[-1]
    monkeypatch.setattr(log, "REPEATS_S", 0.0)
    logging.getLogger("x").warning("refused %d", 100)
    assert capsys.readouterr().err.endswith("refused 100 (90 more like this)\n")


def test_a_traceback_keeps_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("a", "info")
    try:
        raise ValueError("no")
    except ValueError:
        logging.getLogger().exception("broke")
    assert capsys.readouterr().err.endswith("ValueError: no\n")
