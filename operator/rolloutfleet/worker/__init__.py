"""The process in an engine's pod that keeps a copy of the weights there and brings it up to date."""
