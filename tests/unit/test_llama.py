"""Our paged model against transformers': the same logits for every shape, however the work is cut."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from services.executor.model import config as model_config
from services.executor.model import rope, weights
from services.executor.model.weights import Weights, digest, weight_files
from tests.fakes import tiny_models
from tests.fakes.paged import Paged, assert_close, reference_logits

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7], list(range(10, 50)), [99], list(range(100, 20, -1)), [3] * 17]


@pytest.mark.parametrize("name", tiny_models.CONFIGS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    model = tiny_models.reference(name)
    paged = Paged(tiny_models.save(model, tmp_path))
    whole = [reference_logits(model, prompt) for prompt in PROMPTS]
    for cuts in ([1], [1000], [16, 1, 5]):
        for found, expected in zip(paged.logits(PROMPTS, cuts), whole, strict=True):
            assert_close(found, expected)


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    model = tiny_models.reference("llama, grouped heads")
    found = Paged(tiny_models.save(model, tmp_path), torch.bfloat16).logits(PROMPTS, [16, 1, 5])
    for logits, prompt in zip(found, PROMPTS, strict=True):
        expected = reference_logits(model, prompt)[-1]
        assert (logits[-1] - expected).abs().max() <= 0.1 * expected.abs().max()


def test_sliding_windows_are_read_per_layer(tmp_path: Path) -> None:
    tiny_models.save(tiny_models.reference("qwen2, window in some layers"), tmp_path)
    assert model_config.read(tmp_path).windows == (0, 5)


ROPES = {
    "default": "llama, grouped heads",
    "linear": "llama, linear rope",
    "dynamic": "llama, dynamic rope",
    "yarn": "llama, yarn rope",
    "llama3": "llama, llama3 rope",
    "longrope": "llama, longrope",
}


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("spelling", ["rope_type", "type"])
@pytest.mark.parametrize("kind", ROPES)
def test_every_rotary_scaling_under_both_keys_in_both_spellings(
    kind: str, spelling: str, key: str, tmp_path: Path
) -> None:
    name = ROPES[kind]
    tiny_models.CONFIGS[name].save_pretrained(tmp_path)
    settings = tiny_models.CONFIGS[name].rope_parameters
    tiny_models.edit_config(tmp_path, architectures=["LlamaForCausalLM"])
    expected = model_config.read(tmp_path)
    settings = {name: value for name, value in settings.items() if name not in ("rope_type", "rope_theta")}
    settings[spelling] = kind
    tiny_models.edit_config(tmp_path, rope_parameters=None, rope_theta=10000.0)
    tiny_models.edit_config(tmp_path, **{key: settings})
    assert model_config.read(tmp_path) == expected
    tiny_models.edit_config(tmp_path, **{key: settings | {spelling: "helical"}})
    with pytest.raises(ValueError, match="unsupported rotary scaling 'helical'"):
        model_config.read(tmp_path)


def test_every_rotary_scaling_is_another_one() -> None:
    """Or the test of their spellings could not fail."""
    turns = {rope.frequencies(tiny_models.CONFIGS[name], 8) for kind, name in ROPES.items() if kind != "dynamic"}
    assert len(turns) == len(ROPES) - 1, "dynamic is the default within the trained context"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": None}, "(none)"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_we_cannot_compute_is_refused_by_name(changes: dict[str, object], named: str, tmp_path: Path) -> None:
    tiny_models.save(tiny_models.reference("llama, grouped heads"), tmp_path)
    tiny_models.edit_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=named.strip("()")):
        model_config.read(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", '{"architectures": '])
def test_a_broken_config_is_the_users_mistake(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json"):
        model_config.read(tmp_path)


def test_model_40_tensors_missing_extra_doubled_or_misshapen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tiny_models.save(tiny_models.reference("llama, tied"), tmp_path)
    expected = Paged(folder).logits([PROMPTS[1]], [1000])[0]
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    tiny_models.edit_weights(folder, **{"lm_head.weight": embedding.clone(), "rope_freqs.weight": torch.ones(4)})
    assert torch.equal(Paged(folder).logits([PROMPTS[1]], [1000])[0], expected)
    assert not caplog.records
    tiny_models.edit_weights(folder, **{"model.layers.0.surprise": torch.ones(4)})
    Paged(folder)
    assert "model.layers.0.surprise" in caplog.text
    tiny_models.edit_weights(folder, **{"model.norm.weight": torch.ones(7)})
    with pytest.raises(ValueError, match=r"model\.norm\.weight.*\(7,\).*\(48,\)"):
        Paged(folder)
    tiny_models.edit_weights(folder, **{"model.norm.weight": None})
    with pytest.raises(ValueError, match=r"lack model\.norm\.weight"):
        Paged(folder)


def test_model_40_three_shards_and_one_missing(tmp_path: Path) -> None:
    model = tiny_models.reference("llama, grouped heads")
    folder = tiny_models.save(model, tmp_path, max_shard_size="60KB")
    files = weight_files(folder)
    assert len(files) >= 3
    assert_close(Paged(folder).logits([PROMPTS[1]], [1])[0], reference_logits(model, PROMPTS[1]))
    files[1].unlink()
    with pytest.raises(ValueError, match=files[1].name):
        Paged(folder)


def test_a_broken_weights_file_is_named(tmp_path: Path) -> None:
    folder = tiny_models.save(tiny_models.reference("llama, grouped heads"), tmp_path)
    (folder / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        Weights(folder, CPU, torch.float32)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": 3}))
    with pytest.raises(ValueError, match=r"index\.json"):
        weight_files(folder)


def test_the_digest_tells_weights_apart(tmp_path: Path) -> None:
    folder = tiny_models.save(tiny_models.reference("llama, grouped heads"), tmp_path)
    before = digest(weight_files(folder))
    assert digest(weight_files(folder)) == before
    tiny_models.edit_weights(folder, **{"model.norm.weight": torch.full((48,), 1.5)})
    assert digest(weight_files(folder)) != before


def test_a_load_that_takes_long_tells_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_models.save(tiny_models.reference("llama, tied"), tmp_path)
    said: list[str] = []
    for seconds, expected in ((3600.0, []), (-1.0, ["read 1 of 20 tensors", "read 2 of 20 tensors"])):
        monkeypatch.setattr(weights, "_PROGRESS_S", seconds)
        opened = Weights(folder, CPU, torch.float32, said.append)
        for _ in range(2):
            opened.take("model.norm.weight", 48)
        assert said == expected
