"""GRPO on a tiny random Qwen2, in a trainer pod that names a RolloutServer.

Each step: take the batch of samples that the agent has collected, train on it, save a checkpoint, update the fleet's
weights. Kill this process, its pod, the agent, an engine, a router, as often as you like: each prompt of each epoch is
trained once. The reward can only rise if weights really flow.
"""

import argparse
import json
import os
import random
import shutil
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from rolloutfleet.trainer import (
    AgentUnreachable,
    Fleet,
    SampleCollection,
    StepBatch,
    connect,
    prune_checkpoints,
    save_checkpoint,
)

CLIP = 0.2
LIVES_OF_THE_AGENT = 10


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    run_folder = options.weights / "runs" / options.run
    run_folder.mkdir(parents=True, exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.0)
    step, rewards = load(run_folder / "checkpoint.pt", model, optimizer)

    fleet = connect("actor")
    view = fleet.wait_ready(engines=options.engines)
    print(json.dumps({"connected": view.server, "engines": view.routable, "from_step": step}), flush=True)
    if step and view.weight_version != step:  # the last life died between its checkpoint and its update
        update(fleet, model, options, step)
    run = collect(fleet, options, run_folder, step)

    began = time.monotonic()
    for batch in run.batches(step + 1):
        step_began = time.monotonic()
        loss = train_step(model, optimizer, batch)
        rewards.append(sum(reward or 0.0 for reward in batch.rewards) / len(batch.rewards))
        save(run_folder / "checkpoint.pt", model, optimizer, batch.step, rewards)
        run.acknowledge(batch.step)
        trained = time.monotonic()
        version = update(fleet, model, options, batch.step)
        line = {
            "step": batch.step,
            "reward": round(rewards[-1], 4),
            "loss": round(loss, 4),
            "weight_version": version,
            "oldest_version": min(span.version for sample in batch.samples for span in sample.weight_versions),
            "samples": len(batch.samples),
            "seconds_train": round(trained - step_began, 2),
            "seconds_update": round(time.monotonic() - trained, 2),
        }
        print(json.dumps(line), flush=True)

    first, last = sum(rewards[:2]) / len(rewards[:2]), sum(rewards[-2:]) / len(rewards[-2:])
    summary = {
        "steps": len(rewards),
        "reward_first": round(first, 4),
        "reward_last": round(last, 4),
        "reward_gain": round(last / first, 3),
        "weight_version": fleet.weight_version,
        "trained": run.view().trained,
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(summary), flush=True)


def collect(fleet: Fleet, options: argparse.Namespace, folder: Path, step: int) -> SampleCollection:
    """The agent reads the prompts and the reward function from the volume, and keeps the samples there."""
    data = folder / "prompts.jsonl"
    if not data.exists():
        random.seed(options.seed)
        prompts = [[random.randrange(512) for _ in range(options.prompt_tokens)] for _ in range(options.prompts)]
        data.with_suffix(".partial").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        data.with_suffix(".partial").rename(data)
    shutil.copy(Path(__file__).with_name("reward.py"), folder / "reward.py")
    return fleet.collect(
        run=options.run,
        store=str(folder / "samples.sqlite"),
        step=step,
        data={"path": str(data)},
        epochs=options.epochs,
        n=options.samples,
        groups_per_step=options.groups,
        mode=options.mode,
        over_sampling=1.5,
        max_staleness=2,
        sampling_params={"temperature": 1.0, "max_new_tokens": options.response_tokens, "ignore_eos": True},
        reward="reward:reward",
        plugin_folders=[str(folder)],
        estimator="grpo",
    )


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: StepBatch) -> float:
    """One step of GRPO: the ratio to the rollout's log-probs is clipped, whichever version sampled them."""
    optimizer.zero_grad()
    total = 0.0
    for part in batch.padded():
        logits = model(part.tokens, attention_mask=part.attention_mask).logits[:, :-1]
        targets = part.tokens[:, 1:].unsqueeze(-1)
        new = torch.log_softmax(logits, dim=-1).gather(-1, targets).squeeze(-1)
        ratio = (new - part.rollout_log_probs[:, 1:]).exp()
        advantages, mask = part.advantages[:, 1:], part.loss_mask[:, 1:]
        gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
        loss = -(gain * mask).sum() / mask.sum()
        loss.backward()
        total += float(loss.detach())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return total


def update(fleet: Fleet, model: torch.nn.Module, options: argparse.Namespace, version: int) -> int:
    """Versions are steps."""
    path = options.weights / f"v{version:06d}"
    if not path.exists():  # an earlier life may have died between its two lines
        save_checkpoint(model, options.weights, version=version, base=options.model, dtype=torch.bfloat16)
    for _ in range(LIVES_OF_THE_AGENT):
        try:
            version = fleet.update_weights(path, version=version).version
            break
        except AgentUnreachable:  # it died in the middle: what it had written says how far it came
            if fleet.wait_ready().weight_version == version:
                break
    prune_checkpoints(options.weights, keep=3)
    return version


def save(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, rewards: list[float]) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "rewards": rewards}
    torch.save(state, path.with_suffix(".partial"))
    os.replace(path.with_suffix(".partial"), path)


def load(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, list[float]]:
    """Last step and the rewards so far; 0 and none for a new run."""
    if not path.exists():
        return 0, []
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"], state["rewards"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="/models/m0", help="folder of the model that the RolloutServer serves")
    parser.add_argument("--weights", type=Path, default="/weights", help="folder on the volume that engines see")
    parser.add_argument("--run", default="grpo", help="name of the run: it goes on where it was")
    parser.add_argument("--mode", choices=["synchronous", "asynchronous"], default="synchronous")
    parser.add_argument("--engines", type=int, default=2, help="wait for so many engines before the first step")
    parser.add_argument("--prompts", type=int, default=96, help="in the data set")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--groups", type=int, default=8, help="prompts a step")
    parser.add_argument("--samples", type=int, default=8, help="samples a prompt")
    parser.add_argument("--prompt-tokens", type=int, default=4)
    parser.add_argument("--response-tokens", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
