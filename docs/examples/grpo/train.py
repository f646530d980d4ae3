"""GRPO on a tiny random Qwen2, in a trainer pod that names a RolloutServer.

Each step: collect groups of samples, train on them, save, update the fleet's weights; the next step's samples must
come from the new version. The reward can only rise if weights really flow.
"""

import argparse
import json
import random
import time

import torch
from reward import reward
from transformers import AutoModelForCausalLM

from rolloutfleet.trainer import SampleGroup, connect, prune_checkpoints, save_checkpoint

CLIP = 0.2
EPSILON = 1e-6


def main() -> None:
    options = arguments()
    torch.manual_seed(options.seed)
    random.seed(options.seed)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.0)
    fleet = connect("actor")
    view = fleet.wait_ready(engines=options.engines)
    version = view.weight_version or 0
    print(json.dumps({"connected": view.server, "engines": view.routable, "weight_version": version}), flush=True)

    began, rewards, samples = time.monotonic(), [], 0
    for step in range(1, options.steps + 1):
        step_began = time.monotonic()
        prompts = [[random.randrange(512) for _ in range(options.prompt_tokens)] for _ in range(options.prompts)]
        groups = fleet.generate(
            prompts,
            n=options.samples,
            temperature=1.0,
            max_new_tokens=options.response_tokens,
            ignore_eos=True,
        )
        require_version(groups, version)
        generated = time.monotonic()
        mean_reward, loss = train_step(model, optimizer, groups)
        trained = time.monotonic()
        path = save_checkpoint(model, options.weights, version=version + 1, base=options.model, dtype=torch.bfloat16)
        version = fleet.update_weights(path, version=version + 1).version
        prune_checkpoints(options.weights, keep=3)
        ended = time.monotonic()
        rewards.append(mean_reward)
        samples += options.prompts * options.samples
        line = {
            "step": step,
            "reward": round(mean_reward, 4),
            "loss": round(loss, 4),
            "weight_version": version,
            "samples": samples,
            "seconds": round(ended - step_began, 2),
            "seconds_generate": round(generated - step_began, 2),
            "seconds_train": round(trained - generated, 2),
            "seconds_update": round(ended - trained, 2),
        }
        print(json.dumps(line), flush=True)

    first, last = sum(rewards[:2]) / len(rewards[:2]), sum(rewards[-2:]) / len(rewards[-2:])
    summary = {
        "steps": len(rewards),
        "reward_first": round(first, 4),
        "reward_last": round(last, 4),
        "reward_gain": round(last / first, 3),
        "weight_version": version,
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(summary), flush=True)


def require_version(groups: list[SampleGroup], version: int) -> None:
    """Every token of every sample comes from the weights that were committed last."""
    for group in groups:
        for sample in group.samples:
            if sample.status not in ("completed", "truncated"):
                raise SystemExit(f"sample is {sample.status}: {sample.error}")
            versions = {span.version for span in sample.weight_versions}
            if versions != {version}:
                raise SystemExit(f"sampled by versions {sorted(versions)}, committed is {version}")


def train_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, groups: list[SampleGroup]
) -> tuple[float, float]:
    """One step of GRPO: advantages normalised within a group, ratio to the rollout's log-probs clipped.

    All responses have one length here, so tensors are [samples, tokens] without padding.
    """
    scores = torch.tensor([[reward(sample.response_tokens) for sample in group.samples] for group in groups])
    advantages = (scores - scores.mean(dim=1, keepdim=True)) / (scores.std(dim=1, keepdim=True) + EPSILON)
    advantages = advantages.reshape(-1, 1)
    prompt_length = len(groups[0].prompt)
    ids = torch.tensor([sample.tokens for group in groups for sample in group.samples])
    old = torch.tensor([sample.rollout_log_probs for group in groups for sample in group.samples])

    logits = model(ids).logits[:, prompt_length - 1 : -1]
    targets = ids[:, prompt_length:]
    new = torch.log_softmax(logits, dim=-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    ratio = (new - old).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(scores.mean()), float(loss.detach())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="/models/m0", help="folder of the model that the RolloutServer serves")
    parser.add_argument("--weights", default="/weights", help="folder on the volume that engines see")
    parser.add_argument("--engines", type=int, default=2, help="wait for so many engines before the first step")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--prompts", type=int, default=8, help="prompts a step")
    parser.add_argument("--samples", type=int, default=8, help="samples a prompt")
    parser.add_argument("--prompt-tokens", type=int, default=4)
    parser.add_argument("--response-tokens", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
