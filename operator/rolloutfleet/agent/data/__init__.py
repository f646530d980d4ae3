"""The data set of a run: rows that are checked when it is opened, found again by their number, shuffled by a seed."""
