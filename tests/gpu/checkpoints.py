"""Two random Qwen2 checkpoints m0 and m1 of 1.78 B parameters (3.55 GB), made on a GPU.

usage: python -m gpu.checkpoints FOLDER
"""

import sys

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

SHAPE = {
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}

if __name__ == "__main__":
    for seed in (0, 1):
        torch.manual_seed(seed)
        with torch.device("cuda"):
            model = Qwen2ForCausalLM(Qwen2Config(**SHAPE)).to(torch.bfloat16)
        model.save_pretrained(f"{sys.argv[1]}/m{seed}", max_shard_size="100GB")
        del model
