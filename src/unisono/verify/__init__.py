"""Judgement: is a run the same on every number of processes and under every strategy, and if not, why."""
