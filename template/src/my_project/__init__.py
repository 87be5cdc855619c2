"""A training project: what is trained (recipes/), how (train.py), how much (configs/), where."""
