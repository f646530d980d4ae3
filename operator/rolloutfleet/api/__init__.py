"""The custom resources: what users write, what the operator and the agent report. Imports nothing of ours."""
