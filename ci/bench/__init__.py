"""Benchmarks against peers: each is one command, one run, the same work for everybody, a ratio of medians."""
