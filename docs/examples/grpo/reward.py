"""A reward that needs no download: the share of response tokens whose id is in a small set. The agent calls it.

A random model of vocabulary 512 samples ids about evenly, so the reward starts near 96/512 = 0.19 and can reach 1.
"""

from rolloutfleet.trainer import Sample

WANTED = frozenset(range(96))


def reward(sample: Sample) -> float:
    return sum(token in WANTED for token in sample.response_tokens) / max(sample.response_length, 1)
