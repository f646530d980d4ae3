"""Scripts that faults.py sends into pods as `python3 -c TEXT`: the standard library alone, each a file of its own."""
