"""Tiny shapes of models that transformers computes: those that can be served through its interface, and those not."""

from typing import Any

import transformers as hf
from transformers import PreTrainedConfig

from tests.fakes.tiny_models import CONTEXT_LEN, VOCAB_SIZE

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 90,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT_LEN,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GPT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": CONTEXT_LEN,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MIXED = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
_FEW: dict[str, Any] = {"num_local_experts": 5, "num_experts_per_tok": 2}
_MANY: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
_GROUPED: dict[str, Any] = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
}
_LONGROPE = {"rope_type": "longrope", "short_factor": [1.1] * 8, "long_factor": [3.0] * 8}


SERVED: dict[str, PreTrainedConfig] = {
    "gemma3, window in some layers": hf.Gemma3TextConfig(**_BASE | _MIXED | {"head_dim": 32}),
    "gemma3, tied": hf.Gemma3TextConfig(
        **_BASE | _MIXED | {"head_dim": 16, "num_key_value_heads": 1, "tie_word_embeddings": True}
    ),
    "gpt2, learned positions": hf.GPT2Config(**_GPT),
    "opt, learned positions": hf.OPTConfig(**_BASE | {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "gptj": hf.GPTJConfig(**_GPT | {"rotary_dim": 8, "tie_word_embeddings": False}),
    "gpt-neox": hf.GPTNeoXConfig(**_BASE),
    "phi, part of a head rotated": hf.PhiConfig(**_BASE),
    "phi3, fused products": hf.Phi3Config(**_BASE | {"hidden_size": 80}),
    "phi3, longrope": hf.Phi3Config(**_BASE | {"original_max_position_embeddings": 96, "rope_parameters": _LONGROPE}),
    "stablelm": hf.StableLmConfig(**_BASE),
    "gemma2, no soft cap of attention": hf.Gemma2Config(
        **_BASE | {"head_dim": 24, "attn_logit_softcapping": None, "sliding_window": 7}
    ),
    "olmo2": hf.Olmo2Config(**_BASE),
    "granite, scales of its own": hf.GraniteConfig(**_BASE | {"logits_scaling": 3.0, "attention_multiplier": 0.1}),
    "cohere2, window in some layers": hf.Cohere2Config(**_BASE | _MIXED | {}),
    "starcoder2, window": hf.Starcoder2Config(**_BASE | {"sliding_window": 7}),
    "minicpm3, keys wider than values": hf.MiniCPM3Config(**_BASE | _LATENT),
    "deepseek3, experts in groups": hf.DeepseekV3Config(**_BASE | _LATENT | _GROUPED),
    "deepseek2, experts in groups": hf.DeepseekV2Config(
        **_BASE | _LATENT | _GROUPED | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 2.5}
    ),
    "mixtral, experts": hf.MixtralConfig(**_BASE | _FEW),
    "qwen2-moe, shared expert": hf.Qwen2MoeConfig(**_BASE | _MANY | {"shared_expert_intermediate_size": 40}),
    "qwen3-moe, experts": hf.Qwen3MoeConfig(**_BASE | _MANY | {"head_dim": 16, "norm_topk_prob": True}),
    "olmoe, experts": hf.OlmoeConfig(**_BASE | _MANY),
    "granite-moe, experts": hf.GraniteMoeConfig(**_BASE | _FEW),
    "phi-moe, router that is a layer": hf.PhimoeConfig(**_BASE | _FEW),
    "ernie-moe, bias of choices": hf.Ernie4_5_MoeConfig(
        **_BASE | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 0}
    ),
    "hunyuan-moe, asks for a weight's type": hf.HunYuanMoEV1Config(
        **_BASE | {"num_experts": 4, "moe_topk": 2, "head_dim": 16}
    ),
    "jetmoe, experts of its own": hf.JetMoeConfig(**_BASE | _FEW | {"kv_channels": 16}),
}

BATCH_DEPENDENT = {"jetmoe, experts of its own"}
"""Of those served, what has parts that no interface reaches."""

REFUSED: dict[str, tuple[PreTrainedConfig, str]] = {
    "state space": (
        hf.MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=64, num_hidden_layers=1),
        "MambaForCausalLM.*more",
    ),
    "recurrent": (hf.RwkvConfig(vocab_size=VOCAB_SIZE, hidden_size=64, num_hidden_layers=2), "RwkvForCausalLM.*more"),
    "some layers attend": (hf.JambaConfig(**_BASE), "JambaForCausalLM.*more than keys and values"),
    "convolutions": (
        hf.Lfm2Config(**_BASE | {"layer_types": ["conv", "full_attention"]}),
        "Lfm2ForCausalLM.*'conv'",
    ),
    "chunked attention": (hf.Llama4TextConfig(**_BASE | {"head_dim": 16}), "Llama4ForCausalLM.*'chunked_attention'"),
    "ALiBi": (hf.FalconConfig(**_BASE | {"alibi": True}), "FalconForCausalLM: 0 of its 2 layers attend"),
    "soft cap": (hf.Gemma2Config(**_BASE | {"head_dim": 16}), "Gemma2ForCausalLM: Gemma2Attention asks.*softcap"),
    "sinks": (
        hf.GptOssConfig(**_BASE | _MIXED | {"head_dim": 16, "intermediate_size": 96}),
        "GptOssForCausalLM: .*s_aux",
    ),
    "looks ahead": (hf.BertConfig(**_BASE), "BertLMHeadModel: .*looks ahead"),
    "no positions": (
        hf.MptConfig(vocab_size=VOCAB_SIZE, d_model=64, n_layers=1, n_heads=4),
        "MptForCausalLM: it takes no",
    ),
}
