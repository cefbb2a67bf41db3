"""Every latency technique as one figure and one paragraph: `python -m experiments.gallery` makes docs/toolbox.md again.

An entry is a function that simulates, and says in words and in a figure what was gained and what it cost; numbers in the
words come from the runs.
"""
