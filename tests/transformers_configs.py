"""Configs of transformers for models that train within a test; dropout is off, to be compared."""

from typing import Any

from transformers import (
    AutoConfig,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Qwen3Config,
)

CONFIGS = {
    "gpt2": GPT2Config(
        n_embd=24,
        n_layer=3,
        n_head=2,
        vocab_size=256,
        n_positions=32,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    ),
    "llama": LlamaConfig(
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        max_position_embeddings=32,
    ),
    "mixtral": MixtralConfig(
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        num_local_experts=4,
        max_position_embeddings=32,
    ),
    "gemma": GemmaConfig(
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=256,
        max_position_embeddings=32,
    ),
    "qwen3": Qwen3Config(
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=256,
        max_position_embeddings=32,
        tie_word_embeddings=True,
    ),
}

SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "sliding_window": 4,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}

_LATENT: dict[str, Any] = {
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "n_routed_experts"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "moe_intermediate_size"), 16),
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}

ODD = {
    "gemma4": lambda: AutoConfig.for_model(
        "gemma4_text",
        **SIZES | {"vocab_size": 256},
        vocab_size_per_layer_input=256,
        hidden_size_per_layer_input=8,
    ),
    "bert": lambda: small("bert"),
    "bart": lambda: small("bart"),
    "mamba2": lambda: AutoConfig.for_model(
        "mamba2",
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        state_size=8,
        num_heads=8,
        head_dim=8,
        n_groups=2,
    ),
    "bamba": lambda: small(
        "bamba", mamba_n_heads=6, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1
    ),
    "deepseek_v3": lambda: small("deepseek_v3", num_key_value_heads=4, **_LATENT),
    "ernie4_5_moe": lambda: small(
        "ernie4_5_moe", moe_num_experts=4, moe_k=2, moe_intermediate_size=8
    ),
}
"""Kinds with something that others do not have: a buffer in their checkpoints, no order of time, infinity, a
part of their loss, a parameter that is not trained."""

_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8}

ROUTED = {
    "mixtral": lambda: small(
        "mixtral", output_router_logits=True, router_aux_loss_coef=0.5, **_EXPERTS
    ),
    "jetmoe": lambda: small("jetmoe", output_router_logits=True, aux_loss_coef=0.5, **_EXPERTS),
    "a router that there is none of": lambda: small("doge", output_router_logits=True),
}
"""Kinds that say in different words how much of a router's own loss is trained."""

_MORE: dict[str, dict[str, Any]] = {
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 2.0},
    "phi": {"partial_rotary_factor": 1.0, "num_key_value_heads": 4},
}


def small(model_type: str, **more: Any) -> Any:
    """A config of any type, small; its layers slide where the type has such layers."""
    keys = SIZES | _MORE.get(model_type, {}) | more
    if not hasattr(AutoConfig.for_model(model_type), "head_dim"):
        keys.pop("head_dim")
    config = AutoConfig.for_model(model_type, **keys)
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    return config
