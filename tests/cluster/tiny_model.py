"""Two random Qwen2 checkpoints of one shape: m0 is what engines start with, m1 is what an update brings.

usage: tiny_model.py FOLDER
"""

import sys

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

config = Qwen2Config(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
)
for seed in (0, 1):
    torch.manual_seed(seed)
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(f"{sys.argv[1]}/m{seed}")
