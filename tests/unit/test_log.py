"""One readable line per record."""

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


def test_a_traceback_keeps_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("a", "info")
    try:
        raise ValueError("no")
    except ValueError:
        logging.getLogger().exception("broke")
    assert capsys.readouterr().err.endswith("ValueError: no\n")
