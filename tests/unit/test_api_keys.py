"""API keys from options and files."""

import hashlib
from pathlib import Path

import pytest

from shared.api_keys import ApiKey, checked, digest_of, plain_key, read_file
from shared.wire.gateway import TenantLimits

SECRET = "sk-SECRET-77"
HEX = hashlib.sha256(SECRET.encode()).hexdigest()


def file_of(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "keys"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_plain_line_is_a_key_whose_hash_stands_for_it(tmp_path: Path) -> None:
    (key,) = read_file(file_of(tmp_path, "# staff", "", f"  {SECRET} "))
    assert key == ApiKey(digest_of(SECRET.encode()), HEX[:16], None)
    assert SECRET not in repr(key)


def test_a_line_of_json_may_tell_a_name_and_limits_and_hide_the_key(tmp_path: Path) -> None:
    keys = read_file(
        file_of(
            tmp_path,
            f'{{"key": "{SECRET}", "name": "ann", "weight": 2, "requests_per_minute": 60}}',
            f'{{"sha256": "{HEX.upper()}", "name": "bob", "tokens_per_minute": 5000, "concurrency": 4}}',
            f'{{"sha256": "{HEX}"}}',
        )
    )
    digest = bytes.fromhex(HEX)
    assert keys == (
        ApiKey(digest, "ann", TenantLimits(2.0, 60)),
        ApiKey(digest, "bob", TenantLimits(None, 0, 5000, 4)),
        ApiKey(digest, HEX[:16], None),
    )


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (f"{SECRET} and more", "line 2: a key must be printable"),
        ("ключ", "line 2: a key must be printable"),
        ("{}", "line 2: either key or sha256"),
        (f'{{"key": "{SECRET}", "sha256": "{HEX}"}}', "line 2: either key or sha256"),
        (f'{{"key": "{SECRET}", "rpm": 3}}', "line 2: Object contains unknown field `rpm`"),
        (f'{{"key": "{SECRET}", "weight": 0}}', r"line 2: Expected `float` >= 0.001 - at `\$.weight`"),
        (f'{{"key": "{SECRET}", "concurrency": 0}}', r"line 2: Expected `int` >= 1 - at `\$.concurrency`"),
        (f'{{"key": "{SECRET}", "name": "a b"}}', "line 2: .*name"),
        ('{"sha256": "SECRET-77"}', "line 2: .*sha256"),
        (f'{{"key": "{SECRET}"', "line 2: Input data was truncated"),
    ],
)
def test_what_is_wrong_is_told_by_its_line_and_without_the_key(tmp_path: Path, line: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as caught:
        read_file(file_of(tmp_path, "# one", line))
    assert "SECRET" not in str(caught.value)


def test_a_file_without_a_key_would_lock_everybody_out(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no key"):
        read_file(file_of(tmp_path, "# nothing"))


def test_keys_may_share_a_tenant_but_not_disagree() -> None:
    one, two = plain_key("sk-one"), plain_key("sk-two")
    old, new = (ApiKey(key.digest, "ann", TenantLimits(2.0)) for key in (one, two))
    assert checked([old, new, old]) == (old, new)
    with pytest.raises(ValueError, match="the keys of ann have different limits"):
        checked([old, ApiKey(two.digest, "ann")])
    with pytest.raises(ValueError, match="is there twice"):
        checked([old, ApiKey(one.digest, "bob")])
