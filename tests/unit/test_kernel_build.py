"""Kernels that cannot be built are told in a way that the executor can go on from, with plain torch."""

import shutil
from pathlib import Path

import pytest

from services.executor.kernels.cpu import build


@pytest.fixture(autouse=True)
def nothing_prebuilt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "none")


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.NoCompilerError, match=r"no C\+\+ compiler found"):
        build.shared_object(build.level())


def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", shutil.which("false") or "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(build.NoCompilerError, match="false failed"):
        build.shared_object(build.level())
    assert not list((tmp_path / "paternoster" / "kernels").iterdir())


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "paternoster").write_text("a file where the folder should be")
    monkeypatch.setenv("CXX", shutil.which("true") or "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(build.NoCompilerError, match=r"cannot keep compiled kernels in .*: Not a directory"):
        build.shared_object(build.level())
