"""Models of transformers on our paged attention: its own logits however work is cut, and the same bits in a crowd."""

from pathlib import Path

import pytest
import torch
from transformers import T5Config

from services.executor.kernels.choice import choose
from services.executor.kernels.interface import Kernels, Quantization
from services.executor.model import choice, hosted_check, hosted_config
from services.executor.model.config import ModelConfig
from services.executor.model.hosted import HostedModel
from tests.fakes import hosted_models, tiny_models
from tests.fakes.paged import CPU, Paged, assert_close, reference_logits

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK_SIZE = 16
PROMPTS = [[5, 6, 7], list(range(10, 40)), [99], list(range(95, 50, -1)), [3] * 17]
CUTS = [16, 1, 5]


def paged(folder: Path, dtype: torch.dtype = torch.float32, quantization: Quantization = "none") -> Paged:
    def kernels_of(head_dim: int) -> Kernels:
        return choose(CPU, dtype, head_dim, BLOCK_SIZE, quantization)

    return Paged(folder, dtype, kernels_of, BLOCK_SIZE)


@pytest.mark.parametrize("name", hosted_models.SERVED)
def test_logits_are_transformers_own_and_their_bits_those_of_a_prompt_alone(name: str, tmp_path: Path) -> None:
    model = tiny_models.made(hosted_models.SERVED[name])
    served = paged(tiny_models.save(model, tmp_path))
    assert isinstance(served.model, HostedModel)
    in_crowd = served.logits(PROMPTS, CUTS)
    for prompt, found, single in zip(PROMPTS, in_crowd, served.logits(PROMPTS, [1]), strict=True):
        expected = reference_logits(model, prompt)
        alone = served.logits([prompt], [1000])[0]
        for logits in (found, single, alone):
            assert_close(logits, expected)
        if not served.model.batch_dependent:
            assert torch.equal(found, alone)
            assert torch.equal(single, alone)
    assert bool(served.model.batch_dependent) == (name in hosted_models.BATCH_DEPENDENT)


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize(
    "name",
    [
        "gemma3, tied",
        "gpt2, learned positions",
        "phi3, fused products",
        "olmo2",
        "mixtral, experts",
        "qwen2-moe, shared expert",
        "deepseek3, experts in groups",
        "granite-moe, experts",
    ],
)
def test_bits_in_a_crowd_are_those_alone_in_bfloat16(name: str, quantization: Quantization, tmp_path: Path) -> None:
    folder = tiny_models.save(tiny_models.made(hosted_models.SERVED[name]), tmp_path)
    served = paged(folder, torch.bfloat16, quantization)
    assert served.model.batch_dependent == []
    for prompt, found in zip(PROMPTS, served.logits(PROMPTS, CUTS), strict=True):
        assert torch.equal(found, served.logits([prompt], [1000])[0])


def test_a_prefix_computed_amid_others_serves_one_alone(tmp_path: Path) -> None:
    """A cache hit: the bits are those of a prompt that was computed whole."""
    served = paged(tiny_models.save(tiny_models.made(hosted_models.SERVED["mixtral, experts"]), tmp_path))
    expected = served.logits([PROMPTS[3]], [1000])[0]
    found = served.logits(PROMPTS, [32])  # all in one step, and what is left of the longest alone
    assert torch.equal(found[3], expected)


def test_who_multiplies_by_itself_is_announced_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    served = paged(tiny_models.save(tiny_models.made(hosted_models.SERVED["jetmoe, experts of its own"]), tmp_path))
    assert served.model.batch_dependent == ["JetMoeParallelExperts, which computes with weights of its own"]
    assert "JetMoeForCausalLM: bits may depend" in caplog.text


def test_one_thread_works_between_products_and_all_do_in_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads cut a tensor anywhere, in the middle of a vector too, which moves the last bits of GELU."""
    torch.set_num_threads(3)
    served = paged(tiny_models.save(tiny_models.made(hosted_models.SERVED["gemma3, tied"]), tmp_path))
    assert isinstance(served.model, HostedModel)
    between: set[int] = set()
    inside: set[int] = set()
    linear = served.model._model.lm_head
    layer = served.model._model.model.layers[0]
    layer.mlp.act_fn.register_forward_hook(lambda *_: between.add(torch.get_num_threads()))
    product = linear._product
    monkeypatch.setattr(linear, "_product", lambda x: (inside.add(torch.get_num_threads()), product(x))[1])
    served.logits(PROMPTS, CUTS)
    assert (between, inside, torch.get_num_threads()) == ({1}, {3}, 3)


@pytest.mark.parametrize("name", hosted_models.REFUSED)
def test_what_keeps_more_than_keys_and_values_is_refused_by_name(name: str, tmp_path: Path) -> None:
    config, message = hosted_models.REFUSED[name]
    folder = tiny_models.save(tiny_models.made(config), tmp_path)
    with pytest.raises(ValueError, match=f"unsupported architecture {message}"):
        paged(folder)


def test_an_encoder_and_a_decoder_and_an_unknown_kind_are_refused_by_name(tmp_path: Path) -> None:
    T5Config(architectures=["T5ForConditionalGeneration"]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="unsupported architecture T5ForConditionalGeneration"):
        choice.read(tmp_path)
    tiny_models.edit_config(tmp_path, model_type="never-heard-of", architectures=["NeverForCausalLM"])
    with pytest.raises(ValueError, match="unsupported architecture NeverForCausalLM"):
        choice.read(tmp_path)


def test_ours_come_first_and_others_go_through_the_interface(tmp_path: Path) -> None:
    tiny_models.reference("qwen3").config.save_pretrained(tmp_path / "ours")
    hosted_models.SERVED["olmo2"].save_pretrained(tmp_path / "theirs")
    tiny_models.edit_config(tmp_path / "ours", architectures=["Qwen3ForCausalLM"])
    tiny_models.edit_config(tmp_path / "theirs", architectures=["Olmo2ForCausalLM"])
    assert isinstance(choice.read(tmp_path / "ours"), ModelConfig)
    assert isinstance(choice.read(tmp_path / "theirs"), hosted_config.HostedConfig)


@pytest.mark.parametrize("nested", [False, True])
def test_an_unknown_rotary_scaling_stops_the_start(nested: bool, tmp_path: Path) -> None:
    folder = tiny_models.save(tiny_models.made(hosted_models.SERVED["gemma3, tied"]), tmp_path)
    helical = {"rope_type": "helical", "rope_theta": 10000.0}
    scaling = {"full_attention": helical, "sliding_attention": helical} if nested else helical
    tiny_models.edit_config(folder, rope_parameters=scaling)
    with pytest.raises(ValueError, match="unsupported rotary scaling 'helical'"):
        paged(folder)


def test_longrope_is_served_up_to_where_its_frequencies_change(tmp_path: Path) -> None:
    folder = tiny_models.save(tiny_models.made(hosted_models.SERVED["phi3, longrope"]), tmp_path)
    assert choice.read(folder).context_len == 96


def test_a_model_that_computes_something_else_in_pieces_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the reason: here the check is told other tokens than the model is fed."""
    folder = tiny_models.save(tiny_models.made(hosted_models.SERVED["olmo2"]), tmp_path)
    piece = hosted_check.Check._piece

    def forgetful(self: hosted_check.Check, start: int, end: int) -> object:
        batch = piece(self, start, end)
        batch.positions[:] -= start
        return batch

    monkeypatch.setattr(hosted_check.Check, "_piece", forgetful)
    with pytest.raises(ValueError, match=r"unsupported architecture Olmo2ForCausalLM: .* something else"):
        paged(folder)


def test_missing_tensors_and_shards_are_named(tmp_path: Path) -> None:
    model = tiny_models.made(hosted_models.SERVED["olmo2"])
    folder = tiny_models.save(model, tmp_path / "sharded", max_shard_size="60KB")
    shard = next(iter(sorted(folder.glob("model-*.safetensors"))))
    shard.unlink()
    with pytest.raises(ValueError, match=shard.name):
        paged(folder)
    folder = tiny_models.save(model, tmp_path / "whole")
    tiny_models.edit_weights(folder, **{"model.norm.weight": None})
    with pytest.raises(ValueError, match=r"lack or misshape model\.norm\.weight"):
        paged(folder)


def test_tensors_that_are_not_used_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tiny_models.save(tiny_models.made(hosted_models.SERVED["olmo2"]), tmp_path)
    tiny_models.edit_weights(folder, **{"model.surprise": torch.ones(4)})
    paged(folder)
    assert "model.surprise" in caplog.text
