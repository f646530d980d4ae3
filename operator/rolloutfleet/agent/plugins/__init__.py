"""A user's own code in the collection of samples: it runs in processes of its own, so that code that hangs, raises or
ends its process costs its own samples only.

    agent (runner.py)  --pickle over a socket-->  host process (host.py): loads the code, calls it, checks its answer

Calls share one host. When it dies or falls silent nobody knows which call did it: each that was in it is made again
alone in a host of its own, where a bad one can hurt itself only.
"""
