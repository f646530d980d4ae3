"""Random checkpoints for engines on a CPU.

m0 and m1 are Qwen2 models of one shape: m0 is what engines start with, m1 is what an update brings. `vl` is a
Qwen2.5-VL that sees images, with a tokenizer of single bytes, because SGLang places images by their token.

usage: tiny_model.py FOLDER
"""

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Config, Qwen2ForCausalLM

LANGUAGE = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "out_hidden_size": LANGUAGE["hidden_size"],
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [1],
}
SPECIAL_TOKENS = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def language_models(folder: Path) -> None:
    for seed in (0, 1):
        torch.manual_seed(seed)
        Qwen2ForCausalLM(Qwen2Config(**LANGUAGE)).to(torch.bfloat16).save_pretrained(folder / f"m{seed}")


def vision_language_model(folder: Path) -> None:
    folder.mkdir()
    ids = write_tokenizer(folder)
    write_json(
        folder / "preprocessor_config.json",
        {
            "processor_class": "Qwen2_5_VLProcessor",
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": VISION["patch_size"],
            "temporal_patch_size": VISION["temporal_patch_size"],
            "merge_size": VISION["spatial_merge_size"],
            "size": {"shortest_edge": 56 * 56, "longest_edge": 1024 * 1024},
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.25, 0.25, 0.25],
        },
    )
    config = Qwen2_5_VLConfig(
        text_config={**LANGUAGE, "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [4, 6, 6]}},
        vision_config=VISION,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    Qwen2_5_VLForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(folder)


def write_tokenizer(folder: Path) -> dict[str, int]:
    """A token a byte, then the special ones; returns the ids of those."""
    vocabulary = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "vocab.json", vocabulary)
    (folder / "merges.txt").write_text("#version: 0.2\n")
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "additional_special_tokens": SPECIAL_TOKENS,
            "model_max_length": LANGUAGE["max_position_embeddings"],
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "chat_template": CHAT_TEMPLATE,
        },
    )
    return {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content))


language_models(Path(sys.argv[1]))
vision_language_model(Path(sys.argv[1]) / "vl")
