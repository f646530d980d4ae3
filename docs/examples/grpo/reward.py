"""A reward that needs no download: the share of response tokens whose id is in a small set.

A random model of vocabulary 512 samples ids about evenly, so the reward starts near 96/512 = 0.19 and can reach 1.
"""

WANTED = frozenset(range(96))


def reward(response: list[int]) -> float:
    return sum(token in WANTED for token in response) / max(len(response), 1)
