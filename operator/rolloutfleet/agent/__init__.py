"""The agent beside a trainer: finds fleets by name, leads them, updates weights, moves memory, collects samples."""
