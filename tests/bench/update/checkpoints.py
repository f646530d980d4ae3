"""Two random Qwen2 checkpoints, FOLDER/m0 and FOLDER/m1: small (0.9 MB) or large (200 MB).

usage: python checkpoints.py FOLDER small|large
"""

import sys

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

SHAPES = {
    "small": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2},
    "large": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6},
}

if __name__ == "__main__":
    for seed in (0, 1):
        torch.manual_seed(seed)
        config = Qwen2Config(
            **SHAPES[sys.argv[2]],
            vocab_size=512,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            tie_word_embeddings=False,
        )
        Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(f"{sys.argv[1]}/m{seed}")
