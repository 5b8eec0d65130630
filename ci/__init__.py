"""Smoke runs, parity checks and benchmarks."""
