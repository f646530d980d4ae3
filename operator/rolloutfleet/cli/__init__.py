"""`rolloutfleet`: the command line."""
