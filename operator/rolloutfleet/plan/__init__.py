"""Pure decisions: (what is observed, now) -> actions. No I/O, no clock, no randomness: rules on a whiteboard."""
