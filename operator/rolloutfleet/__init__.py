"""Rollout fleets of SGLang engines as Kubernetes resources, with an agent beside the trainer."""
